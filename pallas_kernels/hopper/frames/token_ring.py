"""The loop of a product of few tokens with matrices that are read once.

A cluster of four blocks computes 64 columns. Each block multiplies a quarter of K by WGMMA, with
the matrix as the operand of 64 rows, through a ring of stages in shared memory. The blocks then
send each other their sums, 16 columns to each, which adds them in a fixed order.
"""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device import cluster, token_columns, warpgroup

PARTS = 4  # blocks of a cluster
COLUMNS = PARTS * token_columns.COLUMNS  # of a cluster: the rows of a WGMMA
_SM_BYTES = 227 * 1024  # shared memory of an SM, less a kilobyte for each block
_TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))


@dataclasses.dataclass(frozen=True)
class TokenRing:
    """A product of `[tokens, K]` with matrices, and how it is cut.

    Attributes:
      tokens: a multiple of 8, at most 64.
      k: columns of the tokens.
      columns: of each matrix.
      k_axis: the axis of the matrices, `[layers, K, N]` or `[layers, N, K]`, that is summed over.
      side_by_side: whether the matrices' columns follow each other; else each cluster multiplies
        its columns of all of them.
    """

    tokens: int
    k: int
    columns: tuple[int, ...]
    k_axis: int
    side_by_side: bool

    @classmethod
    def of(cls, x, weights, *, k_axis: int, side_by_side: bool = True) -> "TokenRing":
        """For `x: [tokens, K]` and matrices `[layers, K, N]` (`k_axis` 1) or `[layers, N, K]`."""
        columns = tuple(w.shape[3 - k_axis] for w in weights)
        tokens, k = x.shape
        return cls(tokens, k, columns, k_axis, side_by_side)

    @property
    def tiles(self) -> int:
        """Number of clusters."""
        return (sum(self.columns) if self.side_by_side else self.columns[0]) // COLUMNS

    @property
    def sums(self) -> int:
        """Matrices that a block multiplies."""
        return 1 if self.side_by_side else len(self.columns)

    @property
    def stage_k(self) -> int:
        """Rows of K in a stage."""
        return 128 if self.k % (PARTS * 128) == 0 else 64

    @property
    def stages(self) -> int:
        """Stages that a block multiplies; what lies past K counts as zeros."""
        return pl.cdiv(self.k, PARTS * self.stage_k)

    @property
    def slots(self) -> int:
        """Stages that the ring holds: as many as fit if three blocks share an SM, at least two.

        Three on an SM are faster than one with a deeper ring, even where there is but one: the
        blocks of the next kernel find room and ask for their part of the matrix early.
        """
        parts = 4 * PARTS * self.sums * token_columns.COLUMNS * self.tokens
        stage = 2 * self.stage_k * (self.sums * COLUMNS + self.tokens)
        fitting = (_SM_BYTES // 3 - 1024 - parts) // stage
        return min(self.stages, max(2, fitting))

    def scratch(self, dtype) -> dict[str, Any]:
        """The shared memory that `multiply` takes."""
        w_tile = (self.stage_k, COLUMNS) if self.k_axis == 1 else (COLUMNS, self.stage_k)
        sums = (self.sums, PARTS, token_columns.COLUMNS * self.tokens)
        return dict(
            w_smem=plgpu.SMEM((self.slots, self.sums, *w_tile), dtype, transforms=_TILED),
            x_smem=plgpu.SMEM((self.slots, self.tokens, self.stage_k), dtype, transforms=_TILED),
            parts=plgpu.SMEM(sums, jnp.float32),
            arrived=plgpu.SMEM((2,), jnp.uint32),
            here=plgpu.Barrier(num_arrivals=1 + self.sums, num_barriers=self.slots),
        )


@dataclasses.dataclass(frozen=True)
class Product:
    """A product inside a kernel; its methods are called once each, in this order.

    Attributes:
      ring: how it is cut.
      x: GMEM `[tokens, K]`.
      ws: GMEM, the matrices of all layers.
      number: int32 scalar, the layer.
      smem: what `TokenRing.scratch` asks for.
    """

    ring: TokenRing
    x: Any
    ws: tuple[Any, ...]
    number: jax.Array
    smem: dict[str, Any]

    def fetch_matrices(self) -> None:
        """Fills the ring with the matrices."""
        cluster.expect(4 * self.smem["parts"].size, self.smem["arrived"])
        for stage in range(self.ring.slots):
            self._fetch_matrices(stage)

    def fetch_tokens(self) -> None:
        """Fills the ring with x."""
        for stage in range(self.ring.slots):
            self._fetch_tokens(stage)

    def sums(self) -> list[jax.Array]:
        """For each matrix of the block, its 16 columns for all tokens; see `token_columns`."""
        parts, arrived = self.smem["parts"], self.smem["arrived"]
        acc = plgpu.ACC((COLUMNS, self.ring.tokens), jnp.float32)
        accs = pl.run_scoped(self._accumulate, *self.ring.sums * [acc])
        cluster.exchange_columns(accs, lax.axis_index("part"), parts, arrived)
        cluster.wait_for_parts(arrived)
        return [token_columns.add_parts(parts.at[i]) for i in range(self.ring.sums)]

    def _accumulate(self, *accs):
        ring, smem = self.ring, self.smem
        for stage in range(ring.stages):
            slot = stage % ring.slots
            plgpu.barrier_wait(smem["here"].at[slot])
            for i, acc in enumerate(accs):
                w = smem["w_smem"].at[slot, i]
                plgpu.wgmma(acc, w.T if ring.k_axis == 1 else w, smem["x_smem"].at[slot].T)
            following = stage - 1 + ring.slots  # goes where the stage before this one was
            if stage > 0 and following < ring.stages:
                plgpu.wgmma_wait(len(accs))
                warpgroup.barrier()
                self._fetch_matrices(following)
                self._fetch_tokens(following)
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in accs]

    def _k(self, stage):
        ring = self.ring
        return pl.ds((lax.axis_index("part") * ring.stages + stage) * ring.stage_k, ring.stage_k)

    def _fetch_tokens(self, stage):
        slot = stage % self.ring.slots
        target, here = self.smem["x_smem"].at[slot], self.smem["here"].at[slot]
        plgpu.copy_gmem_to_smem(self.x.at[:, self._k(stage)], target, here)

    def _fetch_matrices(self, stage):
        ring, tile, slot = self.ring, lax.axis_index("tile"), stage % self.ring.slots

        def fetch(w, i, tile):
            columns = pl.ds(tile * COLUMNS, COLUMNS)
            where = (self._k(stage), columns) if ring.k_axis == 1 else (columns, self._k(stage))
            target, here = self.smem["w_smem"].at[slot, i], self.smem["here"].at[slot]
            plgpu.copy_gmem_to_smem(w.at[self.number, *where], target, here)

        first = 0
        for i, w in enumerate(self.ws):
            if not ring.side_by_side or len(self.ws) == 1:
                fetch(w, i, tile)
                continue
            tiles = ring.columns[i] // COLUMNS
            is_here = (first <= tile) & (tile < first + tiles)
            pl.when(is_here)(functools.partial(fetch, w, 0, tile - first))
            first += tiles


def first_column() -> jax.Array:
    """The first of the 16 columns that this block finishes, int32 scalar."""
    return lax.axis_index("tile") * COLUMNS + lax.axis_index("part") * token_columns.COLUMNS

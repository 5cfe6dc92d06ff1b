"""The loop of a product of few tokens with matrices that are read once.

Four thread blocks of a cluster compute 64 columns. Each multiplies a quarter of K by the `engine`,
with the matrix as the operand of 64 rows, through a ring of stages in shared memory. The blocks
then send each other their sums, 16 columns to each, which adds them in a fixed order. A cluster may
have several such subclusters.

Matrices of 8-bit floats are multiplied with tokens that the blocks round, too.
"""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import engine, support, warpgroup
from pallas_kernels.hopper.common.engine import Factor
from pallas_kernels.hopper.common.tiles import tiled
from pallas_kernels.hopper.decode import cluster, rounding, token_columns
from pallas_kernels.quantised import E4M3, Operand, Quantised

PARTS = 4  # thread blocks of a subcluster
COLUMNS = PARTS * token_columns.COLUMNS  # of a subcluster: the rows of an accumulator
_GROUP_SMS = range(8, 19)  # SMs that clusters lie within (GPC), on cards of which we know
_ALIGNMENT = 1024  # of an array in shared memory
_OVERHEAD = 2048  # bytes of shared memory of a block besides its arrays: the system's and barriers


class Matrices(NamedTuple):
    """What a kernel reads of matrices that are multiplied.

    Attributes:
      values: each `[layers, K, N]` or `[layers, N, K]`.
      scales: float32 `[layers, N]` for each matrix that a thread block multiplies, with all columns
        if those of several follow each other. None for matrices of 16 bits.
    """

    values: tuple[Any, ...]
    scales: tuple[Any, ...] | None

    @classmethod
    def of(cls, weights: tuple[Operand, ...], *, side_by_side: bool = True) -> "Matrices":
        """For stacked matrices, all of them `Quantised` or none."""
        quantised = [w for w in weights if isinstance(w, Quantised)]
        if not quantised:
            return cls(weights, None)
        scales = [w.scale[..., 0] for w in quantised]
        if side_by_side:
            scales = [jnp.concatenate(scales, axis=1)]
        return cls(tuple(w.values for w in quantised), tuple(scales))

    def repeated(self, times: int) -> "Matrices":
        """These, so many times; inside a kernel this costs nothing."""
        return Matrices(times * self.values, self.scales and times * self.scales)


@dataclasses.dataclass(frozen=True)
class TokenRing:
    """A product of `[tokens, K]` with matrices, and how it is cut.

    Attributes:
      tokens: a multiple of 8, at most 64.
      k: columns of the tokens.
      columns: of each matrix.
      k_axis: the axis of the matrices, `[layers, K, N]` or `[layers, N, K]`, that is summed over;
        2 for 8-bit floats.
      dtype: of the matrices.
      side_by_side: whether the matrices' columns follow each other; else each subcluster multiplies
        a tile of each of them. So the same matrix twice is two tiles of it at once.
      on_sm: thread blocks that are to share an SM. Three are faster than one with a deeper ring,
        even where there is but one: those of the next kernel find room and ask for their part
        of the matrix early.
      reserved: bytes of shared memory that a block takes for other things.
    """

    tokens: int
    k: int
    columns: tuple[int, ...]
    k_axis: int
    dtype: Any
    side_by_side: bool = True
    on_sm: int = 3
    reserved: int = 0

    @classmethod
    def of(cls, x, weights, *, k_axis: int, **options) -> "TokenRing":
        """For `x: [M, K]`, M a multiple of 8 or fewer, and matrices `[layers, K, N]` (`k_axis` 1)
        or `[layers, N, K]`."""
        (m, k), dtype = x.shape, weights[0].dtype
        columns = tuple(w.shape[3 - k_axis] for w in weights)
        ring = cls(token_columns.padded(m), k, columns, k_axis, jnp.dtype(dtype), **options)
        if "on_sm" not in options and clusters_at_once(3) < ring.tiles <= clusters_at_once(4):
            return dataclasses.replace(ring, on_sm=4)  # all are on the GPU at once
        return ring

    @property
    def tiles(self) -> int:
        """Tiles of 64 columns."""
        return (sum(self.columns) if self.side_by_side else self.columns[0]) // COLUMNS

    @property
    def sums(self) -> int:
        """Matrices that a thread block multiplies."""
        return 1 if self.side_by_side else len(self.columns)

    @property
    def is_8_bits(self) -> bool:
        """Whether matrices, and tokens in shared memory, are 8-bit floats."""
        return self.dtype == E4M3

    @property
    def stage_k(self) -> int:
        """Rows of K in a stage."""
        if self.is_8_bits:
            return rounding.STAGE
        return 128 if self.k % (PARTS * 128) == 0 and self._fitting(128) >= 3 else 64

    @property
    def stages(self) -> int:
        """Stages that a thread block multiplies; what lies past K counts as zeros."""
        return pl.cdiv(self.k, PARTS * self.stage_k)

    @property
    def slots(self) -> int:
        """Stages that the ring holds: as many as fit, at least two."""
        return min(self.stages, max(2, self._fitting(self.stage_k)))

    def _fitting(self, stage_k: int) -> int:
        """Stages of so many rows of K that fit into a thread block's share of shared memory."""
        taken = self.reserved + _OVERHEAD + size((self.parts(), _arrived()))
        stage = self.dtype.itemsize * stage_k * (self.sums * COLUMNS + self.tokens)
        return (engine.current().sm_bytes // self.on_sm - taken) // stage

    def memory(self) -> tuple[Any, Any]:
        """The shared memory in which stages of the matrices and of x lie."""
        w_tile = (self.stage_k, COLUMNS) if self.k_axis == 1 else (COLUMNS, self.stage_k)
        shapes = (self.slots, self.sums, *w_tile), (self.slots, self.tokens, self.stage_k)
        w, x = (plgpu.SMEM(s, self.dtype, transforms=tiled(self.dtype)) for s in shapes)
        return w, x

    def parts(self) -> Any:
        """The shared memory in which sums arrive."""
        shape = (self.sums, PARTS, token_columns.COLUMNS * self.tokens)
        return plgpu.SMEM(shape, jnp.float32)

    def barriers(self) -> Any:
        """The barriers of the stages."""
        copies = self.sums if self.is_8_bits else 1 + self.sums
        return plgpu.Barrier(num_arrivals=copies, num_barriers=self.slots)

    def scratch(self) -> dict[str, Any]:
        """All shared memory that a `Product` takes, but for its barriers, which are `here`."""
        return dict(ring=self.memory(), parts=self.parts(), arrived=_arrived())


@dataclasses.dataclass(frozen=True)
class Product:
    """A product inside a kernel.

    `fetch_matrices` and, behind `with_scales`, `fetch_tokens` fill its ring, or `fetch` does; then
    come `expect`, unless it came before, `send` and `receive`.

    Attributes:
      ring: how it is cut.
      x: GMEM `[M, K]`, 16-bit. Tokens past M count as zeros.
      matrices: GMEM, of all layers.
      number: int32 scalar, the layer.
      tiles: int32 scalars, the subcluster's tile of each matrix that a block multiplies. One past
        the last counts as zeros.
      smem: what `TokenRing.scratch` asks for, where `cluster.prepare` has prepared `arrived`; and
        `here`, the barriers.
      first_block: int32 scalar, the rank in the cluster of the first block of the subcluster.
      scales: of the tokens in 8-bit floats, and their reciprocals; see `with_scales`.
      is_early: bool scalar, whether `fetch_matrices` and `fetch_tokens` fill the whole ring. Else
        they fill the first slot; the others are filled when its stage is there. None: always.
    """

    ring: TokenRing
    x: Any
    matrices: Matrices
    number: jax.Array
    tiles: tuple[jax.Array, ...]
    smem: dict[str, Any]
    first_block: jax.Array | int = 0
    scales: tuple[jax.Array, jax.Array] | None = None
    is_early: jax.Array | None = None

    @property
    def _rank(self) -> jax.Array:
        return self.first_block + lax.axis_index("part")

    @property
    def first_columns(self) -> list[jax.Array]:
        """The first of the 16 columns that this block finishes of each matrix, int32 scalars."""
        part = lax.axis_index("part") * token_columns.COLUMNS
        return [tile * COLUMNS + part for tile in self.tiles]

    def expect(self) -> None:
        """Says that this block has read the sums before, and expects its own."""
        cluster.expect(4 * math.prod(self.smem["parts"].shape), self.smem["arrived"])

    def fetch_matrices(self) -> None:
        """Fills the ring with the matrices."""
        self._fill(self._fetch_matrices)

    def with_scales(self) -> "Product":
        """In 8 bits, with the scales of the tokens, which the subcluster's blocks find together.

        It is called behind what x comes from, and before `expect`. In 16 bits nothing is to do.
        """
        if not self.ring.is_8_bits:
            return self
        part, columns = lax.axis_index("part"), self.ring.stages * self.ring.stage_k
        largest = rounding.largest(self.x, part * columns, columns)
        sums, arrived = self.smem["parts"], self.smem["arrived"]
        found = rounding.scales(largest, self._rank, sums.at[0, 0], arrived)
        return dataclasses.replace(self, scales=found)

    def fetch_tokens(self) -> None:
        """Fills the ring with x."""
        self._fill(self._fetch_tokens)

    def fetch(self, slots: range) -> None:
        """Fills these slots with both."""
        for slot in slots:
            self._fetch_matrices(slot)
        for slot in slots:
            self._fetch_tokens(slot)

    def drop(self, slots: range) -> None:
        """Empties slots that have been filled."""
        for slot in slots:
            plgpu.barrier_wait(self.smem["here"].at[slot])

    def send(self) -> None:
        """Multiplies, and sends the sums; then the ring is free."""
        columns = self.ring.sums * [self.ring.tokens]
        accs = engine.current().sum_in_pipeline(self._accumulate, columns)
        parts, arrived = self.smem["parts"], self.smem["arrived"]
        cluster.exchange_columns(accs, self._rank, parts, arrived)

    def receive(self) -> list[jax.Array]:
        """For each matrix of the block, its 16 columns for all tokens; see `token_columns`."""
        factors = []
        for first, scale in zip(self.first_columns, self.matrices.scales or (), strict=False):
            # A tile past the last has none.
            first = jnp.minimum(first, scale.shape[1] - token_columns.COLUMNS)
            factors.append(token_columns.load(scale.at[self.number], first, self.ring.tokens))
        cluster.wait_for_parts(self.smem["arrived"])
        sums = [token_columns.add_parts(self.smem["parts"].at[i]) for i in range(self.ring.sums)]
        if self.scales is None:
            return sums
        return [s * self.scales[0] * factor for s, factor in zip(sums, factors, strict=True)]

    def _fill(self, fetch):
        def fetch_others():
            for stage in range(1, self.ring.slots):
                fetch(stage)

        fetch(0)
        fetch_others() if self.is_early is None else pl.when(self.is_early)(fetch_others)

    def _accumulate(self, sums):
        ring, (w_smem, x_smem) = self.ring, self.smem["ring"]
        for stage in range(ring.stages):
            slot = stage % ring.slots
            plgpu.barrier_wait(self.smem["here"].at[slot])
            if stage == 0 and self.is_early is not None:
                pl.when(~self.is_early)(functools.partial(self.fetch, range(1, ring.slots)))
            x = Factor(x_smem.at[slot], 1)
            products = [(Factor(w_smem.at[slot, i], ring.k_axis - 1), x) for i in range(ring.sums)]
            sums = engine.current().step(sums, products)
            following = stage - 1 + ring.slots  # goes where the stage before this one was
            if stage > 0 and following < ring.stages:
                warpgroup.barrier()
                self._fetch_matrices(following)
                self._fetch_tokens(following)
        return sums

    def _k(self, stage):
        ring = self.ring
        return pl.ds((lax.axis_index("part") * ring.stages + stage) * ring.stage_k, ring.stage_k)

    def _fetch_tokens(self, stage):
        slot = stage % self.ring.slots
        target, here, k = self.smem["ring"][1].at[slot], self.smem["here"].at[slot], self._k(stage)
        if self.scales is not None:
            rounding.store(self.x, k.start, self.scales[1], target)
        else:
            # Rows past those of x are read as zeros, which a static slice would refuse.
            tokens = pl.ds(jnp.int32(0), self.ring.tokens)
            plgpu.copy_gmem_to_smem(self.x.at[tokens, k], target, here)

    def _fetch_matrices(self, stage):
        ring, slot = self.ring, stage % self.ring.slots

        def fetch(w, i, tile):
            columns = pl.ds(tile * COLUMNS, COLUMNS)
            where = (self._k(stage), columns) if ring.k_axis == 1 else (columns, self._k(stage))
            target, here = self.smem["ring"][0].at[slot, i], self.smem["here"].at[slot]
            plgpu.copy_gmem_to_smem(w.at[self.number, *where], target, here)

        if len(self.tiles) == len(ring.columns):
            for i, (w, tile) in enumerate(zip(self.matrices.values, self.tiles, strict=True)):
                fetch(w, i, tile)
            return
        (tile,), first = self.tiles, 0
        for w, columns in zip(self.matrices.values, ring.columns, strict=True):
            tiles = columns // COLUMNS
            is_here = (first <= tile) & (tile < first + tiles)
            pl.when(is_here)(functools.partial(fetch, w, 0, tile - first))
            first += tiles


def multiply_rounds(
    of_round: Callable[[jax.Array], Product],
    rounds: jax.Array,
    store: Callable[..., None],
    then: Callable[[], None] = lambda: None,
) -> None:
    """Multiplies in rounds; the ring is being filled for the first.

    Args:
      of_round: the product of a round, given its number.
      rounds: int32 scalar, their number. It is the same in a cluster, as its blocks wait for each
        other.
      store: called with the first of a block's 16 columns and what `Product.receive` returns.
      then: called as soon as the ring is free of the last one.
    """
    pl.when(rounds <= 0)(then)

    @pl.loop(0, rounds)
    def _(i):
        product = of_round(i)
        ring = product.ring
        product.expect()
        product.send()
        warpgroup.barrier()  # all warps' products have ended

        @pl.when(i + 1 < rounds)
        def _():
            of_round(i + 1).fetch(range(ring.slots))

        pl.when(i + 1 == rounds)(then)
        for first_column, columns in zip(product.first_columns, product.receive(), strict=True):
            is_there = first_column < ring.tiles * COLUMNS
            pl.when(is_there)(functools.partial(store, first_column, columns))


def _arrived() -> Any:
    return plgpu.SMEM((4,), jnp.uint32)


def clusters_at_once(on_sm: int, blocks: int = PARTS) -> int:
    """Clusters of so many thread blocks that are on a GPU at once if `on_sm` share an SM, to within
    one: with 132 SMs an H100 or H200 holds 30, 62 and 92 of four blocks with 1, 2 and 3, and 15, 30
    and 45 of eight."""
    return 15 * on_sm * support.sm_count() // (16 * blocks)


def most_waiting(arrays: Any, on_sm: int, blocks: int) -> int:
    """Clusters that surely are on the GPU at once, so that they can wait for each other; 0 if a
    block does not fit. A group of SMs leaves those idle on which no other cluster fits.

    Args:
      arrays: those in the shared memory of a thread block.
      on_sm: thread blocks that may share an SM, if they have no more.
      blocks: thread blocks of a cluster.
    """
    on_sm = min(on_sm, fitting(arrays))
    if not on_sm:
        return 0
    least = min(size * on_sm // blocks / size for size in _GROUP_SMS)  # of an SM
    found = min(3 * clusters_at_once(on_sm, blocks) // 4, int(least * support.sm_count()))
    return max(1, found)


def fitting(arrays: Any) -> int:
    """Thread blocks with such arrays in shared memory that fit on an SM."""
    return engine.current().sm_bytes // (size(arrays) + _OVERHEAD)


def size(arrays: Any) -> int:
    """Bytes of a tree of arrays in shared memory."""
    leaves = jax.tree.leaves(arrays)
    sizes = [math.prod(array.shape) * array.dtype.itemsize for array in leaves]
    return sum(pl.cdiv(size, _ALIGNMENT) * _ALIGNMENT for size in sizes)

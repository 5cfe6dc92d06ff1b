"""Products of up to 64 tokens with matrices that are read once, at the speed of memory (decoding).

A cluster of four blocks computes 64 columns: each block multiplies a quarter of K by WGMMA, with
the matrix as the operand of 64 rows. The blocks then send each other their sums, 16 columns to
each, which adds them in a fixed order and finishes them: norm, bias, activation or residual.

A block asks for its part of the matrix before it waits for the kernel before it (programmatic
dependent launch), so that memory does not stand still between kernels. Matrices must therefore be
finished earlier: inputs of the program, not results of the computation just before.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device import cluster, token_columns
from pallas_kernels.layouts.stream import Stream

MAX_TOKENS = 64
_PARTS = 4  # blocks of a cluster
_COLUMNS = _PARTS * token_columns.COLUMNS  # of a cluster: the rows of a WGMMA
_SM_BYTES = 227 * 1024  # shared memory of an SM, less a kilobyte for each block


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How a product is cut.

    Attributes:
      k_axis: the axis of the matrices, `[layers, K, N]` or `[layers, N, K]`, that is summed over.
      side_by_side: whether the matrices' columns follow each other; else each block multiplies
        its columns of all of them.
      stage_k: rows of K in a stage of the ring in shared memory.
      stages: stages that a block multiplies.
      slots: stages that the ring holds.
    """

    k_axis: int
    side_by_side: bool
    stage_k: int
    stages: int
    slots: int


def project(
    stream: Stream,
    weights: tuple[jax.Array, ...],
    layer: jax.Array,
    *,
    k_axis: int,
    eps: float,
    bias: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Products of the normed stream with matrices, side by side: `norm(x) @ concat(weights)`.

    Args:
      stream: of at most 64 tokens, a multiple of 8.
      weights: each `[layers, D, N_i]` (`k_axis` 1) or `[layers, N_i, D]` (2), in the dtype of the
        stream; D a multiple of 256, N_i of 64.
      layer: int32 `[1]`, the matrices' index.
      k_axis: the axis of D.
      eps: of the norm.
      bias: `[layers, sum of N_i]`, or None.
      dtype: of the result; None takes the stream's.

    Returns:
      `[M, sum of N_i]`.
    """
    tokens = stream.x.shape[0]
    columns = sum(w.shape[3 - k_axis] for w in weights)
    out = jax.ShapeDtypeStruct((tokens, columns), dtype or stream.x.dtype)

    def finish(refs, outs, number, first):
        scale = token_columns.inverse_rms(refs[0], stream.x.shape[1], eps)

        def store(values):
            (total,) = values
            total *= scale
            if bias is not None:
                total += token_columns.load(refs[1].at[number], first, tokens)
            token_columns.store(outs[0], first, total)

        return store

    operands = [stream.squares] + ([] if bias is None else [bias])
    call = _Call("token_project", k_axis, True, finish)
    return call(stream.scaled, weights, layer, operands, [out])[0]


def gate(
    stream: Stream,
    weights: tuple[jax.Array, ...],
    layer: jax.Array,
    *,
    eps: float,
    activation: str,
    prefetch: tuple[jax.Array, ...] = (),
    batch: int = MAX_TOKENS,
) -> jax.Array:
    """The hidden activation of a dense block, `act(norm(x) @ w_0^T)`, times `norm(x) @ w_1^T`.

    Args:
      stream: of at most 64 tokens, a multiple of 8.
      weights: (gate, up) or one of them, each `[layers, H, D]` in the dtype of the stream; D a
        multiple of 256, H of 64.
      layer: int32 `[1]`.
      eps: of the norm.
      activation: "relu" or "silu".
      prefetch: up to two `[layers, H, D]`, whose rows will be read for neurons above zero.
      batch: only the first so many tokens prefetch; the others are padding.

    Returns:
      `[M, H]`.
    """
    tokens, d = stream.x.shape
    out = jax.ShapeDtypeStruct((tokens, weights[0].shape[1]), stream.x.dtype)

    def finish(refs, outs, number, first):
        squares, *rows = refs
        scale = token_columns.inverse_rms(squares, d, eps)

        def store(values):
            g, *up = (v * scale for v in values)
            h = jnp.maximum(g, 0.0) if activation == "relu" else g / (1 + jnp.exp(-g))
            for u in up:
                h *= u
            token_columns.store(outs[0], first, h)
            if rows:
                token_columns.prefetch_rows([w.at[number] for w in rows], first, h, batch)

        return store

    call = _Call("token_gate", 2, False, finish)
    return call(stream.scaled, weights, layer, [stream.squares, *prefetch], [out])[0]


def add_product(
    h: jax.Array,
    weight: jax.Array,
    layer: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    *,
    bias: jax.Array | None = None,
) -> Stream:
    """Adds a product to the residual stream: `x + h @ weight[layer] + bias[layer]`.

    Args:
      h: `[M, K]`, M at most 64 and a multiple of 8, K a multiple of 256.
      weight: `[layers, K, D]`, D a multiple of 64.
      layer: int32 `[1]`.
      x: `[M, D]`.
      scale: `[layers, D]`, of the norm that comes next.
      bias: `[layers, D]`, or None.

    Returns:
      The stream in front of that norm.
    """
    tokens, d = x.shape
    outs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((tokens, d // token_columns.COLUMNS), jnp.float32),
    ]

    def finish(refs, outs, number, first):
        before = token_columns.load(refs[0], first, tokens)
        if bias is not None:
            before += token_columns.load(refs[2].at[number], first, tokens)
        factor = token_columns.load(refs[1].at[number], first, tokens)

        def store(values):
            after = (before + values[0]).astype(x.dtype)
            token_columns.store(outs[0], first, after)
            after = after.astype(jnp.float32)
            token_columns.store(outs[1], first, after * factor)
            token_columns.store_squares(outs[2], first // token_columns.COLUMNS, after)

        return store

    call = _Call("token_add_product", 1, True, finish)
    operands = [x, scale] + ([] if bias is None else [bias])
    return Stream(*call(h, (weight,), layer, operands, outs))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel that multiplies and then does what `finish` says.

    Attributes:
      name: the kernel's name.
      k_axis, side_by_side: see `_Plan`.
      finish: called with references to the further operands and to the results, the layer, and the
        first of the block's 16 columns, while the products are on their way. It returns what is
        called with the finished sums: for each matrix of a block an array of `token_columns`.
    """

    name: str
    k_axis: int
    side_by_side: bool
    finish: Callable

    def __call__(self, x, weights, layer, operands, outs):
        tokens, k = x.shape
        sizes = [w.shape[3 - self.k_axis] for w in weights]
        tiles = (sum(sizes) if self.side_by_side else sizes[0]) // _COLUMNS
        accs = 1 if self.side_by_side else len(weights)
        stage_k = 128 if k % (_PARTS * 128) == 0 else 64
        stages = k // (_PARTS * stage_k)
        part_bytes = 4 * _PARTS * accs * token_columns.COLUMNS * tokens
        stage_bytes = 2 * stage_k * (accs * _COLUMNS + tokens)
        slots = min(stages, _slots(stages, stage_bytes, part_bytes))
        plan = _Plan(self.k_axis, self.side_by_side, stage_k, stages, slots)
        tiled = dict(transforms=(plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)))
        w_tile = (stage_k, _COLUMNS) if self.k_axis == 1 else (_COLUMNS, stage_k)
        dtype = x.dtype
        kernel = plgpu.kernel(
            functools.partial(
                _kernel, plan=plan, counts=(len(weights), len(operands)), finish=self.finish
            ),
            out_type=outs,
            scratch_types=dict(
                w_smem=plgpu.SMEM((slots, accs, *w_tile), dtype, **tiled),
                x_smem=plgpu.SMEM((slots, tokens, stage_k), dtype, **tiled),
                parts=plgpu.SMEM((accs, _PARTS, token_columns.COLUMNS * tokens), jnp.float32),
                arrived=plgpu.SMEM((2,), jnp.uint32),
                here=plgpu.Barrier(num_arrivals=1 + accs, num_barriers=slots),
            ),
            grid=(tiles,),
            grid_names=("tile",),
            cluster=(_PARTS,),
            cluster_names=("part",),
            kernel_name=self.name,
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
        )
        return kernel(x, layer, *weights, *operands)


def _slots(stages: int, stage_bytes: int, part_bytes: int) -> int:
    """Stages that the ring holds: as many as fit if three blocks share an SM, but at least two.

    Three on an SM are faster than one with a deeper ring, even where there is but one: the blocks
    of the next kernel find room and ask for their part of the matrix early.
    """
    return max(2, min(stages, (_SM_BYTES // 3 - 1024 - part_bytes) // stage_bytes))


def _kernel(x, layer, *refs, w_smem, x_smem, parts, arrived, here, plan, counts, finish):
    ws, operands, outs = refs[: counts[0]], refs[counts[0] : sum(counts)], refs[sum(counts) :]
    tile, part = lax.axis_index("tile"), lax.axis_index("part")
    cluster.expect(4 * parts.size, arrived)
    number = layer[0]

    def k_of(stage):
        return pl.ds((part * plan.stages + stage) * plan.stage_k, plan.stage_k)

    def fetch_matrix(stage):
        slot = stage % plan.slots

        def fetch(w, acc, column):
            columns = pl.ds(column * _COLUMNS, _COLUMNS)
            where = (k_of(stage), columns) if plan.k_axis == 1 else (columns, k_of(stage))
            plgpu.copy_gmem_to_smem(w.at[number, *where], w_smem.at[slot, acc], here.at[slot])

        _for_matrices(ws, tile, fetch, plan)

    def fetch_tokens(stage):
        slot = stage % plan.slots
        plgpu.copy_gmem_to_smem(x.at[:, k_of(stage)], x_smem.at[slot], here.at[slot])

    for stage in range(plan.slots):
        fetch_matrix(stage)
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    for stage in range(plan.slots):
        fetch_tokens(stage)
    first = tile * _COLUMNS + part * token_columns.COLUMNS
    store = finish(operands, outs, number, first)

    def multiply(*accs):
        for stage in range(plan.stages):
            slot = stage % plan.slots
            plgpu.barrier_wait(here.at[slot])
            for i, acc in enumerate(accs):
                w = w_smem.at[slot, i]
                plgpu.wgmma(acc, w.T if plan.k_axis == 1 else w, x_smem.at[slot].T)
            following = stage - 1 + plan.slots  # goes where the stage before this one was
            if stage > 0 and following < plan.stages:
                plgpu.wgmma_wait(len(accs))
                _warpgroup_barrier()
                fetch_matrix(following)
                fetch_tokens(following)
        plgpu.wgmma_wait(0)
        return [acc[...] for acc in accs]

    acc = plgpu.ACC((_COLUMNS, x.shape[0]), jnp.float32)
    cluster.exchange_columns(pl.run_scoped(multiply, *parts.shape[0] * [acc]), part, parts, arrived)
    cluster.wait_for_parts(arrived)
    store([token_columns.add_parts(parts.at[i]) for i in range(parts.shape[0])])


def _for_matrices(ws, tile, fetch, plan) -> None:
    """Calls `fetch(matrix, accumulator, tile of the matrix)` for what a block multiplies."""
    first = 0
    for i, w in enumerate(ws):
        if not plan.side_by_side or len(ws) == 1:
            fetch(w, i, tile)
            continue
        tiles = w.shape[3 - plan.k_axis] // _COLUMNS
        is_here = (first <= tile) & (tile < first + tiles)
        pl.when(is_here)(functools.partial(fetch, w, 0, tile - first))
        first += tiles


@plgpu.inline_mgpu()
def _warpgroup_barrier(_):
    """All warps' products with a stage have ended, before it is filled again."""
    mgpu.warpgroup_barrier()

"""Down projection on tile unions: `h @ w_down[neurons]` for each row tile, or a sum of such.

The product is computed transposed, columns of y along the rows of an accumulator and tokens along
its columns, as h and the gathered rows lie in memory.
"""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import operands
from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.hopper.frames.gathered_matmul import CONSUMERS, ROWS, STEP
from pallas_kernels.layouts.tile_union import CHUNK, TOKENS, Plan

_COLUMNS = CONSUMERS * ROWS
_STEPS = CHUNK // STEP  # of a block


def union_down_reference(h, weights, plan, m):
    """Pure-JAX meaning of `union_down`."""
    column = jnp.arange(plan.neurons.shape[1])
    keep = (column < plan.sizes[:, None])[:, :, None]
    blocks = jnp.minimum(plan.firsts[:, None] + column // CHUNK, len(h) - 1)
    y = 0
    for i, w in enumerate(weights):
        part = jnp.where(keep, h[blocks, _first_row(h, weights, i) + column % CHUNK], 0)
        rows = jnp.where(keep, w[plan.neurons], 0)
        y += jnp.einsum("rht,rhd->rtd", part, rows, preferred_element_type=jnp.float32)
    return y.reshape(-1, y.shape[-1])[: -(-m // 8) * 8].astype(h.dtype)


def union_down(h: jax.Array, weights: tuple[jax.Array, ...], plan: Plan, m: int) -> jax.Array:
    """Sums `h[n] w[n]` over the neurons n in the union of each tile, and over weights, in float32.

    Args:
      h: `[items, 128 or 256, 256]`, bfloat16 or float16, the block of each item as `union_up`
        returns h; for two weights two, one above the other. At least `item_count` items.
      weights: one or two arrays `[H, D]` of the same dtype, H a multiple of 128 up to 65536, D a
        multiple of 64 from 128 to 8192: `w_down`, or for the gradient `w_gate` and `w_up`.
      plan: the unions.
      m: number of tokens.

    Returns:
      y: `[m rounded up to a multiple of 8, D]` in the dtype of h.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    for w in weights:
        operands.check_weight("a weight", w)
    neurons, d = weights[0].shape
    operands.check_array("the second weight", weights[-1], (neurons, d), weights[0].dtype)
    rows = 2 * CHUNK if h.shape[1] == 2 * CHUNK else CHUNK * len(weights)
    operands.check_array("h", h, (h.shape[0], rows, TOKENS), weights[0].dtype)
    tiles = pl.cdiv(m, TOKENS)
    operands.check_array("plan.neurons", plan.neurons, (tiles, neurons), jnp.int32)
    return gathered_matmul.gathered_matmul(
        _describe,
        _produce,
        _consume,
        plan.neurons,
        plan.sizes,
        plan.firsts,
        h,
        *weights,
        jobs=lambda _, sizes, *rest: jnp.int32(sizes.shape[0] * pl.cdiv(d, _COLUMNS)),
        a_shape=(STEP, _COLUMNS),
        b_shape=(STEP, TOKENS),
        out_type=jax.ShapeDtypeStruct((pl.cdiv(m, 8) * 8, d), h.dtype),  # for the copies' tiling
        name="union_down",
    )


def _describe(i, _, sizes, firsts, *rest):
    """Row tile, its size and first block, and the first column of y."""
    blocks = pl.cdiv(rest[-1].shape[1], _COLUMNS)
    tile = i // blocks
    return tile, sizes[tile], firsts[tile], i % blocks * _COLUMNS


def _produce(job, ring, step, *refs):
    neurons, _, _, h, *weights, _ = refs
    tile, size, first_block, column = job
    steps = pl.cdiv(size, STEP)

    def indices_of(k):
        first = jnp.minimum(k * STEP, neurons.shape[1] - STEP)
        return neurons.at[tile, pl.ds(first, STEP)]

    for w, weight in enumerate(weights):

        def fill(k, indices, a, b, loaded, w=w, weight=weight):
            rows = pl.ds(_first_row(h, weights, w) + k % _STEPS * STEP, STEP)
            plgpu.copy_gmem_to_smem(h.at[first_block + k // _STEPS, rows], b, loaded)
            gathered_matmul.gather_rows(weight, indices, size - k * STEP, column, a)

        step = ring.put_lists(step, steps, indices_of, fill)
    return step


def _consume(job, ring, step, warpgroup, buffers, *refs):
    _, _, _, _, *weights, y = refs
    tile, size, _, column = job
    steps = len(weights) * pl.cdiv(size, STEP)
    mine = pl.ds(warpgroup * ROWS, ROWS)
    out = ring.multiply(step, steps, lambda acc, a, b: plgpu.wgmma(acc, a.at[:, mine].T, b))
    columns = pl.ds(column + warpgroup * ROWS, ROWS)
    for part in range(TOKENS // ROWS):
        tokens = out[:, part * ROWS : (part + 1) * ROWS].astype(y.dtype)
        tokens = plgpu.layout_cast(tokens, plgpu.Layout.WGMMA_TRANSPOSED)
        target = y.at[pl.ds(tile * TOKENS + part * ROWS, ROWS), columns]
        gathered_matmul.write(tokens, buffers.at[part % 2], target, transposed=True)
    return step + steps


def _first_row(h, weights, i):
    """Of the i-th weight's rows in the blocks of h; what lies above those of the first is not h."""
    return h.shape[1] - CHUNK * (len(weights) - i)

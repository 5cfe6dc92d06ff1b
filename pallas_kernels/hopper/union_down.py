"""Down projection on tile unions: `h @ w_down[neurons]` for each row tile, or a sum of two such.

The product is computed transposed, with columns of y along the rows of an accumulator and tokens
along its columns, because h and the gathered rows lie in memory that way. If there are few tokens,
two jobs share those of a tile.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import support
from pallas_kernels.hopper.device import row_copies
from pallas_kernels.hopper.device.tiles import ACC_ROWS, CONSUMERS, STAGE_K
from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS, Plan, first_row

COLUMNS = CONSUMERS * ACC_ROWS  # columns of y in a job
_STEPS = CHUNK_NEURONS // STAGE_K  # steps of the product in a block


def union_down(h: jax.Array, weights: tuple[jax.Array, ...], plan: Plan, m: int) -> jax.Array:
    """Sums `h[n] w[n]` over the neurons n in the union of each tile, and over weights, in float32.

    Args:
      h: `[items, 128 or 256, 256]`, bfloat16 or float16, the block of each item as `union_up`
        returns it, with or without gates; for two weights, the first one's block above that of the
        second. At least `item_count` items.
      weights: one or two arrays `[H, D]` of the same dtype, H a multiple of 128 up to 65536, D a
        multiple of 64 from 128 to 8192: `w_down`, or for the gradient for x `w_gate` and `w_up`.
      plan: the unions.
      m: number of tokens.

    Returns:
      y: `[m rounded up to a multiple of 8, D]` in the dtype of h.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    for w in weights:
        support.check_weight("a weight", w)
    neurons, d = weights[0].shape
    support.check_array("the second weight", weights[-1], (neurons, d), weights[0].dtype)
    rows = 2 * CHUNK_NEURONS if h.shape[1] == 2 * CHUNK_NEURONS else CHUNK_NEURONS * len(weights)
    support.check_array("h", h, (h.shape[0], rows, TILE_TOKENS), weights[0].dtype)
    tiles = pl.cdiv(m, TILE_TOKENS)
    support.check_array("plan.neurons", plan.neurons, (tiles, neurons), jnp.int32)
    tokens = gathered_matmul.job_tokens(tiles)
    return gathered_matmul.gathered_matmul(
        functools.partial(describe, TILE_TOKENS // tokens),
        functools.partial(_produce, tokens),
        functools.partial(_consume, tokens),
        plan.neurons,
        plan.sizes,
        plan.firsts,
        h,
        *weights,
        jobs=lambda *_: jnp.int32(job_count(tokens, tiles, d)),
        a_shape=(STAGE_K, COLUMNS),
        b_shape=(STAGE_K, tokens),
        out_type=jax.ShapeDtypeStruct((pl.cdiv(m, 8) * 8, d), h.dtype),  # for the copies' tiling
        name="union_down",
    )


def job_count(tokens: int, tiles: int, d: int) -> int:
    """The number of jobs of so many tokens of a row tile."""
    return tiles * (TILE_TOKENS // tokens) * pl.cdiv(d, COLUMNS)


def describe(shares, i, _, sizes, firsts, *rest) -> tuple[jax.Array, ...]:
    """The job's tokens (of which each tile has `shares`), the size and the first block of their
    union, and the first column of y, the last of the operands and outputs."""
    blocks = pl.cdiv(rest[-1].shape[1], COLUMNS)
    share = i // blocks
    tile = share // shares
    return share, sizes[tile], firsts[tile], i % blocks * COLUMNS


def tile_and_tokens(share: jax.Array, tokens: int) -> tuple[jax.Array, pl.Slice]:
    """The row tile of a job's tokens, and these tokens in it."""
    shares = TILE_TOKENS // tokens
    return share // shares, pl.ds(share % shares * tokens, tokens)


def put_union(ring, step, neurons_ref, tile, job, weight_ref, put_values) -> jax.Array:
    """Fills the stages of a product over a union: a with rows of the weight, b by `put_values`.

    `put_values(k, indices, b, loaded)` fills it with the values of the neurons in step k, and past
    the size of the union with anything finite; the other arguments are those of `Ring.put_lists`.

    Returns:
      The next step.
    """
    _, size, _, column = job

    def indices_of(k):
        first = jnp.minimum(k * STAGE_K, neurons_ref.shape[1] - STAGE_K)
        return neurons_ref.at[tile, pl.ds(first, STAGE_K)]

    def fill(k, indices, a, b, loaded):
        put_values(k, indices, b, loaded)
        row_copies.gather_rows(weight_ref, indices, size - k * STAGE_K, column, a)

    return ring.put_lists(step, pl.cdiv(size, STAGE_K), indices_of, fill)


def columns_of(warpgroup) -> Callable[..., None]:
    """The `wgmma` of `Ring.multiply` for a consumer's columns of y."""
    mine = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)

    def wgmma(acc, a, b):
        plgpu.wgmma(acc, a.at[:, mine].T, b)

    return wgmma


def write_columns(out, job, warpgroup, buffers, y) -> None:
    """Starts to copy a consumer's columns of y, `out: [64, tokens]`, to GMEM."""
    share, _, _, column = job
    tokens = out.shape[1]
    columns = pl.ds(column + warpgroup * ACC_ROWS, ACC_ROWS)
    for part in range(tokens // ACC_ROWS):
        values = out[:, part * ACC_ROWS : (part + 1) * ACC_ROWS].astype(y.dtype)
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        target = y.at[pl.ds(share * tokens + part * ACC_ROWS, ACC_ROWS), columns]
        gathered_matmul.write(values, buffers.at[part % 2], target, transposed=True)


def _produce(tokens, job, ring, step, *refs):
    neurons, _, _, h, *weights, _ = refs
    share, _, first_block, _ = job
    tile, mine = tile_and_tokens(share, tokens)
    for w, weight in enumerate(weights):

        def copy_block(k, _, b, loaded, w=w):
            rows = pl.ds(first_row(h, len(weights), w) + k % _STEPS * STAGE_K, STAGE_K)
            plgpu.copy_gmem_to_smem(h.at[first_block + k // _STEPS, rows, mine], b, loaded)

        step = put_union(ring, step, neurons, tile, job, weight, copy_block)
    return step


def _consume(tokens, job, ring, step, warpgroup, buffers, *refs):
    _, _, _, _, *weights, y = refs
    _, size, _, _ = job
    steps = len(weights) * pl.cdiv(size, STAGE_K)
    out = ring.multiply(step, steps, columns_of(warpgroup), columns=tokens)
    write_columns(out, job, warpgroup, buffers, y)
    return step + steps

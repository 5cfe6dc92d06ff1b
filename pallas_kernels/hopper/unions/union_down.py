"""Down projection on tile unions: `h @ w_down[neurons]` for each row tile, or a sum of two such.

The product is computed transposed, with columns of y along the rows of an accumulator and tokens
along its columns, because h and the gathered rows lie in memory that way. What y is added to
follows the weights through the ring, of a few tokens at a time (`Engine.part`). If there are few
tokens, two jobs share those of a tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import copies, engine, row_copies, support
from pallas_kernels.hopper.common.engine import Factor
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS
from pallas_kernels.hopper.unions import gathered_matmul
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS, Plan, first_row

_COLUMNS = CONSUMERS * ACC_ROWS  # columns of y in a job


class _Job(NamedTuple):
    """128 columns of y for some tokens of a row tile.

    Attributes:
      share: the number of the tokens' share; each tile has one or two.
      size: neurons in the tile's union.
      first_chunk: the first of its chunks in h.
      column: the first column.
    """

    share: jax.Array
    size: jax.Array
    first_chunk: jax.Array
    column: jax.Array


class _Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
      neurons, sizes, firsts: of the plan.
      h: `[items, 128 or 256, 256]`.
      residual: `[M rounded up to a multiple of 8, D]`, or None.
      weights: one or two `[H, D]`.
    """

    neurons: Any
    sizes: Any
    firsts: Any
    h: Any
    residual: Any
    weights: tuple


def union_down(
    h: jax.Array,
    weights: tuple[jax.Array, ...],
    plan: Plan,
    m: int,
    residual: jax.Array | None = None,
) -> jax.Array:
    """Sums `h[n] w[n]` over the neurons n in the union of each tile, and over weights, in float32.

    Args:
      h: `[items, 128 or 256, 256]`, bfloat16 or float16, the chunk of each item as `union_up`
        returns it, with or without gates; for two weights, the first one's chunk above that of the
        second. At least `item_count` items.
      weights: one or two arrays `[H, D]` of the same dtype, H a multiple of 128 up to 65536, D a
        multiple of 64 from 128 to 8192: `w_down`, or for the gradient for x `w_gate` and `w_up`.
      plan: the unions.
      m: number of tokens.
      residual: `[m, D]` in the dtype of h, to which the rounded sums are added; None for the sums.

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
    if residual is not None:
        support.check_array("residual", residual, (m, d), h.dtype)
        residual = jnp.pad(residual, ((0, -m % 8), (0, 0)))  # for the tiling of its copies
    tokens, stage_k = gathered_matmul.job_tokens(tiles), engine.current().stage_k(h.dtype)
    return gathered_matmul.gathered_matmul(
        _Operands(plan.neurons, plan.sizes, plan.firsts, h, residual, tuple(weights)),
        job_type=_Job,
        jobs=lambda _: jnp.int32(tiles * (TILE_TOKENS // tokens) * pl.cdiv(d, _COLUMNS)),
        describe=functools.partial(_describe, TILE_TOKENS // tokens),
        produce=functools.partial(_produce, tokens),
        consume=functools.partial(_consume, tokens),
        a_shape=(stage_k, _COLUMNS),
        b_shape=(stage_k, tokens),
        dtype=h.dtype,
        out_type=jax.ShapeDtypeStruct((pl.cdiv(m, 8) * 8, d), h.dtype),  # for the copies' tiling
        transposed=True,
        name="union_down",
    )


def _describe(shares, i, operands):
    """The i-th job; each tile's tokens are cut into `shares`."""
    blocks = pl.cdiv(operands.weights[0].shape[1], _COLUMNS)
    share = i // blocks
    tile = share // shares
    return _Job(share, operands.sizes[tile], operands.firsts[tile], i % blocks * _COLUMNS)


def _produce(tokens, job, ring, step, operands):
    neurons, h, factors = operands.neurons, operands.h, len(operands.weights)
    shares, stage_k = TILE_TOKENS // tokens, ring.b.shape[1]
    tile, mine = job.share // shares, pl.ds(job.share % shares * tokens, tokens)
    steps, of_chunk = pl.cdiv(job.size, stage_k), CHUNK_NEURONS // stage_k

    def indices_of(k):
        first = jnp.minimum(k * stage_k, neurons.shape[1] - stage_k)
        return neurons.at[tile, pl.ds(first, stage_k)]

    for w, weight in enumerate(operands.weights):

        def fill(k, indices, a, b, loaded, w=w, weight=weight):
            rows = pl.ds(first_row(h, factors, w) + k % of_chunk * stage_k, stage_k)
            copies.load(h, (job.first_chunk + k // of_chunk, rows, mine), b, loaded)
            row_copies.gather_rows(weight, indices, job.size - k * stage_k, job.column, a)

        step = ring.put_lists(step, steps, indices_of, fill)
    if operands.residual is None:
        return step

    width = engine.current().part

    def put_residual(part, step):
        def fill(a, _, loaded):
            rows = pl.ds(job.share * tokens + part * width, width)
            columns = pl.ds(job.column, _COLUMNS)
            copies.load(operands.residual, (rows, columns), a, loaded)

        ring.put(step, fill)
        return step + 1

    return lax.fori_loop(0, tokens // width, put_residual, step)


def _consume(tokens, job, ring, step, warpgroup, buffers, operands, y):
    steps = len(operands.weights) * pl.cdiv(job.size, ring.b.shape[1])
    mine, width = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS), engine.current().part

    def factors(a, b):
        return Factor(a.at[:, mine], 0), Factor(b, 0)

    out = ring.multiply(step, steps, factors, buffers.free, columns=tokens)
    step += steps
    columns = pl.ds(job.column + warpgroup * ACC_ROWS, ACC_ROWS)
    for part in range(tokens // width):
        values = out[:, part * width : (part + 1) * width].astype(y.dtype)
        values = plgpu.layout_cast(values, plgpu.Layout.WGMMA_TRANSPOSED)
        if operands.residual is not None:
            a, _ = ring.take(step)
            before = plgpu.load(a.at[:, mine].T, layout=plgpu.Layout.WGMMA_TRANSPOSED)
            values = (before.astype(jnp.float32) + values.astype(jnp.float32)).astype(y.dtype)
        rows = pl.ds(job.share * tokens + part * width, width)
        buffers.write([values], part, [(y, (rows, columns))])
        if operands.residual is not None:
            ring.release(step)  # behind the fence of `write`, as TMA overwrites what was read
            step += 1
    return step

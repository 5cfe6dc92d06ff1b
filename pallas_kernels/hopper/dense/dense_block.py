"""The feed-forward block, densely, for a prompt: two matmuls whose tiles suit the number of tokens.

For 65 to 1023 tokens the products of a library leave many SMs idle, and what lies between them
passes through memory. Here a tile has gate and up of the same neurons, of which its epilogue makes
h. The tiles are as wide as lets all SMs end together; the down projection also splits H, and its
parts are summed where the result is used.
"""

import functools
import math

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl

from pallas_kernels.hopper.common import matmul, support, versions
from pallas_kernels.hopper.common.matmul import BLOCK_ROWS, Schedule
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import ACC_ROWS, STAGE_K
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights

_MOST_COLUMNS = 256  # of an accumulator
_DOWN_COLUMNS = 128
_MOST_PARTS = 8  # of H in the down projection
_STAGES = 8  # at most: as many as fit


def dense_block(
    x: jax.Array, weights: Weights, rectifier: Rectifier = RELU
) -> tuple[jax.Array, jax.Array]:
    """`y = h w_down`, where h is `act(x w_gate^T) * (x w_up^T)`, or `act(x w_up^T)` without a gate.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      weights: `[H, D]` each, in the dtype of x, H a multiple of 128 up to 65536.
      rectifier: act, which may pass `x w_up^T` through a ReLU.

    Returns:
      y: `[M, D]`. Sums are those of `gate_union`; the gate, h and y are rounded.
      h: `[M, H]`. Where the gate is 0, h is +0.0, or NaN if up is not finite; where it is not and h
        is 0, h is -0.0. So its bits tell which neurons are active.

    Raises:
      ValueError: if a shape or dtype is not as above, or weights have a number of live neurons.
    """
    if weights.live is not None:
        raise ValueError("dense_block computes all neurons, so weights.live must be None")
    support.check_gate_matmul(x, weights.activated, None)
    for w in (weights.up, weights.down):
        support.check_array("a weight", w, weights.activated.shape, x.dtype)
    (m, d), h = x.shape, len(weights.down)
    row_blocks = pl.cdiv(m, BLOCK_ROWS)
    schedule = _up_schedule(row_blocks, h, d, len(weights.inner))
    hidden = matmul.matmul(
        x,
        weights.inner,
        functools.partial(_write_hidden, rectifier, schedule.columns),
        out_type=jax.ShapeDtypeStruct((row_blocks * BLOCK_ROWS, h), x.dtype),
        scratch_types={},
        schedule=schedule,
        name="dense_block_up",
    )
    schedule = _down_schedule(row_blocks, h, d)
    sums = matmul.matmul(
        hidden,
        (weights.down,),
        functools.partial(_write_sums, schedule),
        k_axis=0,
        out_type=jax.ShapeDtypeStruct((schedule.parts, len(hidden), d), jnp.float32),
        scratch_types={},
        schedule=schedule,
        name="dense_block_down",
    )
    return jnp.sum(sums[:, :m], axis=0).astype(x.dtype), hidden[:m]


def _up_schedule(row_blocks: int, h: int, d: int, matrices: int) -> Schedule:
    """The one with which the product takes the least time, by a model of it."""
    widths = range(8, _MOST_COLUMNS // matrices + 1, 8)

    def time(columns):
        waves = pl.cdiv(row_blocks * h // columns, sm_count())
        return waves * _tile_time(matrices * columns, d // STAGE_K)

    return Schedule(stages=_STAGES, columns=min((c for c in widths if h % c == 0), key=time))


def _down_schedule(row_blocks: int, h: int, d: int) -> Schedule:
    """Likewise. All parts have the same number of stages, at least 2."""
    columns = math.gcd(_DOWN_COLUMNS, d)
    stages = h // STAGE_K
    splits = [p for p in range(1, _MOST_PARTS + 1) if stages % p == 0 and stages // p >= 2]

    def time(parts):
        waves = pl.cdiv(row_blocks * d // columns * parts, sm_count())
        return waves * _tile_time(columns, stages // parts)

    return Schedule(stages=_STAGES, columns=columns, parts=min(splits, key=time))


def _tile_time(columns: int, stages: int) -> float:
    """Of a tile, in ns: its operations or its copies from L2 to shared memory, and its epilogue.

    An H200's SM multiplies at 5.4 TFLOP/s and copies at 72 GB/s (docs/design/0022).
    """
    return stages * max(3.0 * columns, 1.8 * columns + 230) + 1500


def _write_hidden(rectifier, columns, acc, slab, tile, hidden):
    dtype = hidden.dtype
    gate = rectifier.gate(acc[:, :columns], dtype).astype(dtype).astype(jnp.float32)
    value = gate
    if acc.shape[1] > columns:
        value = gate * rectifier.linear(acc[:, columns:])
    is_zero = value.astype(dtype).astype(jnp.float32) == 0
    value = jnp.where(gate != 0, jnp.where(is_zero, -0.0, value), jnp.abs(value))
    rows = pl.ds(slab * ACC_ROWS, ACC_ROWS)
    versions.store(hidden.at[rows, pl.ds(tile * columns, columns)], value.astype(dtype))


def _write_sums(schedule, acc, slab, tile, sums):
    rows = pl.ds(slab * ACC_ROWS, ACC_ROWS)
    columns = pl.ds(tile // schedule.parts * schedule.columns, schedule.columns)
    versions.store(sums.at[tile % schedule.parts, rows, columns], acc)

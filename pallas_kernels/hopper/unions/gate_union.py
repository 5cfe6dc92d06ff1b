"""Gate matmul with a union epilogue: `act(x @ w_gate^T)` leaves the registers as tile unions.

The product is computed transposed: an accumulator has neurons along its rows and the 256 tokens of
a row tile along its columns. A neuron is in the union if its row is not all zero. Such a row is
stored, as 512 contiguous bytes; the dense gate never reaches memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import quantised
from pallas_kernels.hopper.common import matmul, support
from pallas_kernels.hopper.common.matmul import Schedule
from pallas_kernels.hopper.common.tiles import CONSUMERS
from pallas_kernels.hopper.unions import union_relu
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, TILE_TOKENS
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier

# With a width of 8, a quarter of the SMs would get the first tokens of all sequences, which fire
# most (docs/design/0003-gate-matmuls.md).
_SCHEDULE = Schedule(grid_tile_width=7)


def gate_union(
    x: Operand,
    w_gate: Operand,
    rectifier: Rectifier = RELU,
    live: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `g = act(x @ w_gate^T)` as unions over row tiles; `tile_union` defines the format.

    Sums in float32, those of 8-bit floats in fewer bits, as tensor cores do (docs/design/0029);
    rounds once and propagates NaN.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_gate: `[H, D]` of the same dtype, H a multiple of 128 up to 65536. Or both are `Quantised`,
        with a scale for each row, and D is a multiple of 128.
      rectifier: act.
      live: int32 `[1]`: neurons from this number on have gates of zero, and are not computed, but
        for those in the last block of 128. None: all are computed.
      dtype: bfloat16 or float16, that of the gate; None for that of x, if it is not `Quantised`.

    Returns:
      gate: `[R, H, 256]`, R = ceil(M / 256); rows of neurons that are
        not in `masks[0]` are unspecified.
      masks: uint32 `[2, R, H / 32]`.
      counts: uint8 `[H / 64, R * 256]`.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    dtype = support.check_gate_matmul(x, w_gate, dtype)
    support.check_array("live", live, (1,), jnp.int32)
    m, h = x.shape[0], w_gate.shape[0]
    tokens, weight, scales = quantised.unscaled(x, w_gate)
    tiles = pl.cdiv(m, TILE_TOKENS)
    return matmul.matmul(
        weight,
        (tokens,),
        functools.partial(_write_union, rectifier),
        out_type=(
            jax.ShapeDtypeStruct((tiles, h, TILE_TOKENS), dtype),
            jax.ShapeDtypeStruct((2, tiles, h // 32), jnp.uint32),
            jax.ShapeDtypeStruct((h // GROUP_NEURONS, tiles * TILE_TOKENS), jnp.uint8),
        ),
        scratch_types=dict(
            words=plgpu.SMEM((CONSUMERS, union_relu.UNION_WORDS), jnp.uint32),
        ),
        schedule=_SCHEDULE,
        rows=live,
        leave_out=_write_none,
        scales=scales and scales[::-1],
    )


def _write_union(rectifier, acc, group, tile, gate, masks, counts, *, words):
    union_relu.union_relu(
        acc,
        gate.at[tile, pl.ds(group * GROUP_NEURONS, GROUP_NEURONS)],
        *_description(group, tile, masks, counts),
        words.at[group % CONSUMERS],
        rectifier=rectifier,
        threshold=tile_union.OUTLYING_ABOVE,
    )


def _write_none(group, tile, _, masks, counts):
    union_relu.write_none(*_description(group, tile, masks, counts))


def _description(group, tile, masks, counts):
    """The parts of both masks and of the counts that describe 64 neurons of a tile."""
    bits = pl.ds(group * (GROUP_NEURONS // 32), GROUP_NEURONS // 32)
    tokens = pl.ds(tile * TILE_TOKENS, TILE_TOKENS)
    return masks.at[0, tile, bits], masks.at[1, tile, bits], counts.at[group, tokens]

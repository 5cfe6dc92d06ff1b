"""Gate matmul with a TwELL epilogue: `act(x @ w_gate^T)` leaves the registers packed.

The dense gate never reaches memory: the consumers of `matmul` pack their 64 x 256 accumulators
lane by lane (`pack_relu`) and send them out by TMA.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import quantised
from pallas_kernels.hopper.common import matmul, support
from pallas_kernels.hopper.common.matmul import Schedule
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS
from pallas_kernels.hopper.twell import pack_relu
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier

_WORDS = twell.TILE // twell.COMPRESSION

_TUNED = {  # (D, H) of common shapes where another schedule was faster: benchmarks/tune.py
    (512, 1408): Schedule(grid_tile_width=4),
}


def gate_pack(
    x: Operand,
    w_gate: Operand,
    rectifier: Rectifier = RELU,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    config: Schedule | None = None,
) -> jax.Array:
    """Computes `g = act(x @ w_gate^T)` in TwELL (arXiv 2603.23198); `twell` defines the format.

    Sums as `gate_union` does, rounds once and propagates NaN. The order of a tile's entries and the
    words past a row's count are unspecified.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_gate: `[H, D]` of the same dtype, H a multiple of 128 up to 65536. Or both are `Quantised`,
        with a scale for each row, and D is a multiple of 128.
      rectifier: act.
      dtype: bfloat16 or float16, that of the gate; None for that of x, if it is not `Quantised`.
      config: schedule; None for the one that suits D and H.

    Returns:
      uint32 `[M, ceil(H / 256), 32]`. Rows for which `twell.overflowed` holds have true counts but
      not all of their entries.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    dtype = support.check_gate_matmul(x, w_gate, dtype)
    m, (h, d) = x.shape[0], w_gate.shape
    tiles = pl.cdiv(h, twell.TILE)
    tokens, weight, scales = quantised.unscaled(x, w_gate)
    packed = matmul.matmul(
        tokens,
        (weight,),
        functools.partial(_pack, h=h, dtype=dtype, rectifier=rectifier),
        out_type=jax.ShapeDtypeStruct((m, tiles * _WORDS), jnp.uint32),
        scratch_types=dict(
            packed_smem=plgpu.SMEM(
                (CONSUMERS, ACC_ROWS, _WORDS), jnp.uint32, transforms=pack_relu.PACKED_TRANSFORMS
            )
        ),
        schedule=config or _TUNED.get((d, h), Schedule()),
        scales=scales,
    )
    return packed.reshape(m, tiles, _WORDS)


def _pack(acc, slab, tile, packed_gmem, *, packed_smem, h, dtype, rectifier):
    if h % twell.TILE:  # columns past H are loaded as 0, but 0 * inf is NaN
        column = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=plgpu.Layout.WGMMA)
        acc = jnp.where(column < h - tile * twell.TILE, acc, 0)
    mine = packed_smem.at[slab % CONSUMERS]
    pack_relu.pack_relu(acc, dtype, tile, mine, rectifier)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
        mine, packed_gmem.at[pl.ds(slab * ACC_ROWS, ACC_ROWS), pl.ds(tile * _WORDS, _WORDS)]
    )

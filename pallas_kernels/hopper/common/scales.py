"""Scales of quantised operands, which the sums of their products are multiplied with."""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.tiles import ACC_ROWS

_ROWS = plgpu.Layout.WGMMA.reduce(1)
_COLUMNS = plgpu.Layout.WGMMA.reduce(0)


def padded(scale: jax.Array, block: int) -> jax.Array:
    """A float32 scale `[n]`, continued by zeros to a multiple of `block`."""
    return jnp.pad(scale, (0, -scale.size % block))


def of_rows(scale_ref, first: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """The scales of an accumulator's rows, from `first` on, in each of its columns.

    Args:
      scale_ref: GMEM, float32 `[n]`.
      first: int32 scalar.
      shape: the accumulator's.
    """
    part = scale_ref.at[pl.ds(first, shape[0])]
    return _over(plgpu.load(part, layout=_ROWS, optimized=False), shape, 0)


def of_columns(scale_ref, first: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """As `of_rows`, but the scales of its columns, in each of its rows."""
    part = scale_ref.at[pl.ds(first, shape[1])]
    return _over(plgpu.load(part, layout=_COLUMNS, optimized=False), shape, 1)


def of_listed_rows(scale_ref, indices_ref, shape: tuple[int, int]) -> jax.Array:
    """As `of_rows`, but row i has the scale `indices[i]`; indices past the end get the last scale.

    Args:
      scale_ref: GMEM, float32 `[H]`.
      indices_ref: GMEM, int32 `[64]`.
      shape: the accumulator's, of 64 rows.
    """
    return _over(gather(scale_ref, indices_ref), shape, 0)


@primitive
def gather(scale_ref, indices_ref) -> jax.Array:
    """`scale[indices]`, float32 `[64]`, by a load for each row."""
    f32, i32 = ir.F32Type.get, lambda: ir.IntegerType.get_signless(32)
    indices = plgpu.load(indices_ref, layout=_ROWS, optimized=False)
    result = plgpu.ShapeDtypeStruct((ACC_ROWS,), jnp.float32, layout=_ROWS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _ROWS), return_type=result)
    def step(_, scale_ref, indices):
        last = simt.const(ir.MemRefType(scale_ref.type).shape[0] - 1)
        one = ir.VectorType.get((1,), f32())
        scales = np.empty_like(indices.registers)
        for place, register in np.ndenumerate(indices.registers):
            index = arith.minui(mgpu.utils.bitcast(register, i32()), last)
            value = mgpu.utils.inline_ptx(
                "ld.global.nc.f32 $0, [$1];",
                simt.gmem_address(scale_ref, arith.muli(index, simt.const(4))),
                result_types=f32(),
            )
            scales[place] = vector.from_elements(one, [value])
        return mgpu.FragmentedArray(_registers=scales, _layout=_ROWS.to_mgpu(), _is_signed=None)

    return step(scale_ref, indices)


@gather.in_jax
def _(scale_ref, indices_ref):
    return scale_ref[...].at[indices_ref[...]].get(mode="clip")


def _over(scales, shape, axis):
    return lax.broadcast_in_dim(scales, shape, (axis,))

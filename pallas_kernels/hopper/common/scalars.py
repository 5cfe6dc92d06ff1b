"""Single numbers: their layout and types in registers, and how they are read from GMEM."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.simt import const

SCALAR = plgpu.Layout.WG_SPLAT(())
INT32, FLOAT32, BOOL = (
    plgpu.ShapeDtypeStruct((), dtype, layout=SCALAR)
    for dtype in (jnp.int32, jnp.float32, jnp.bool_)
)


def int32(word: ir.Value) -> mgpu.FragmentedArray:
    """A result `INT32` of `plgpu.inline_mgpu`; all lanes have the same `word` (i32)."""
    return mgpu.FragmentedArray.splat(word, (), is_signed=True)


@primitive
def read(ref) -> jax.Array:
    """The int32 scalar `ref` (GMEM); the load stays behind `await_previous`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=INT32)
    def step(_, ref):
        value = mgpu.utils.inline_ptx(
            "ld.global.b32 $0, [$1];",
            simt.gmem_address(ref, const(0)),
            result_types=const(0).type,
            has_side_effects=True,
        )
        return int32(value)

    return step(ref)


@read.in_jax
def _(ref):
    return ref[0]

"""Single numbers: their layout in registers, and how they are read from GMEM."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.simt import const

SCALAR = plgpu.Layout.WG_SPLAT(())


def read(ref) -> jax.Array:
    """The int32 scalar `ref` (GMEM); the load stays behind `await_previous`."""
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, ref):
        value = mgpu.utils.inline_ptx(
            "ld.global.b32 $0, [$1];",
            simt.gmem_address(ref, const(0)),
            result_types=const(0).type,
            has_side_effects=True,
        )
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return step(ref)

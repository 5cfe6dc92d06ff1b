"""Single numbers in GMEM."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device import simt
from pallas_kernels.hopper.device.gather import SCALAR
from pallas_kernels.hopper.device.simt import const


def read(ref) -> jax.Array:
    """The int32 scalar `ref` (GMEM); the load stays behind `griddepcontrol_wait`."""
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

"""Numbers in GMEM, spread over the lanes of every warp."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.simt import const

WARP = 32  # lanes
WARPS = 4  # of a block


def layout(size: int):
    """The layout of an array of `load`."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


@primitive
def load(ref) -> jax.Array:
    """The numbers of `ref` (GMEM, int32 `[n]`), int32 `[128 * words]`.

    Lane l of each warp has number 32 i + l in its i-th word, 0 past the last. The loads stay behind
    `await_previous`.
    """
    (n,) = ref.shape
    starts = range(0, n, WARP)
    size = WARPS * WARP * len(starts)
    result = plgpu.ShapeDtypeStruct((size,), jnp.int32, layout=layout(size))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, ref):
        lane, _ = simt.lane_and_warp()
        address = simt.gmem_address(ref, arith.muli(lane, const(4)))
        words = [
            simt.load_word(address, 4 * start, simt.less(lane, const(n - start)))
            for start in starts
        ]
        return simt.int_array(words, layout(size))

    return step(ref)


@load.in_jax
def _load(ref):
    """Each number once."""
    return ref[...]


def of_lane(words: mgpu.FragmentedArray) -> list[ir.Value]:
    """The words of this lane, i32."""
    return [vector.extract(register, [], [0]) for register in words.registers.flat]

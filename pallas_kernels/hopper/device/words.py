"""Numbers in GMEM, spread over the lanes of every warp."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.device import simt
from pallas_kernels.hopper.device.simt import const

WARP = 32  # lanes
_WARPS = 4


def layout(size: int):
    """The layout of an array of `load`."""
    return plgpu.Layout.WG_STRIDED((size,), vec_size=1)


def load(ref) -> jax.Array:
    """The sums over rows of `ref` (GMEM, int32 `[rows, n]`), int32 `[128 * words]`.

    Lane l of each warp has number 32 i + l in its i-th word, 0 past the last. The loads stay behind
    `griddepcontrol_wait`.
    """
    rows, n = ref.shape
    count = pl.cdiv(n, WARP)
    size = _WARPS * WARP * count
    result = plgpu.ShapeDtypeStruct((size,), jnp.int32, layout=layout(size))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, ref):
        (width, _), _ = ir.MemRefType(ref.type).get_strides_and_offset()
        lane, _ = simt.lane_and_warp()
        address = simt.gmem_address(ref, arith.muli(lane, const(4)))

        def load_word(row, start):
            is_there = simt.less(lane, const(n - start))
            return mgpu.utils.inline_ptx(
                f"mov.b32 $0, 0; @$2 ld.global.b32 $0, [$1 + {4 * (row * width + start)}];",
                address,
                is_there,
                result_types=const(0).type,
                has_side_effects=True,
            )

        starts = [WARP * i for i in range(count)]
        of_rows = [[load_word(row, start) for start in starts] for row in range(rows)]
        sums = [functools.reduce(arith.addi, words) for words in zip(*of_rows, strict=True)]
        return simt.int_array(sums, layout(size))

    return step(ref)


def of_lane(words: mgpu.FragmentedArray) -> list[ir.Value]:
    """The words of this lane, i32."""
    return [vector.extract(register, [], [0]) for register in words.registers.flat]

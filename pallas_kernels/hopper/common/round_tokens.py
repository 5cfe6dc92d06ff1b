"""Tokens in 8-bit floats, in one pass: each is read once, and its scale found in registers.

A warp rounds a row, which stays in its registers.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import eight_bits, params, simt, support
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.quantised import E4M3, Quantised

_ROWS = 4  # of a warpgroup
_CHUNK = 16  # bytes that a lane loads at a time, of 8 numbers
_PASS = 32 * _CHUNK  # bytes that a warp loads at a time


def round_tokens(x: jax.Array) -> Quantised:
    """Rounds tokens as `quantised.rounded` does, to the bit.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 8 up to 8192.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_tokens(x)
    m, d = x.shape
    kernel = plgpu.kernel(
        _kernel,
        out_type=(jax.ShapeDtypeStruct((m, d), E4M3), jax.ShapeDtypeStruct((m, 1), jnp.float32)),
        grid=(pl.cdiv(m, _ROWS),),
        grid_names=("block",),
        kernel_name="round_tokens",
        compiler_params=params.UNORDERED,
    )
    return Quantised(*kernel(x))


def _kernel(x, values, scale):
    first = lax.axis_index("block") * _ROWS
    rows = pl.ds(first, _ROWS)
    _round_rows(x.at[rows], values.at[rows], scale.at[rows], x.shape[0] - first)


def _round_rows(x_ref, values_ref, scale_ref, count: jax.Array) -> None:
    """Rounds four rows as `quantised.rounded` does.

    Args:
      x_ref: GMEM `[4, D]`, bfloat16 or float16, D a multiple of 8.
      values_ref: GMEM, float8_e4m3fn `[4, D]`.
      scale_ref: GMEM, float32 `[4, 1]`.
      count: int32 scalar: only so many rows are there.
    """
    dtype, d = jnp.dtype(x_ref.dtype), x_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(*3 * [plgpu.RefType()], SCALAR))
    def step(_, x_ref, values_ref, scale_ref, count):
        lane, warp = simt.lane_and_warp()
        is_row = simt.less(warp, count.registers.item())

        def address(ref, size):  # of the lane's first chunk, where 8 numbers take `size` bytes
            row = arith.muli(warp, const(d * size // 8))
            return simt.gmem_address(ref, arith.addi(row, arith.muli(lane, const(size))))

        source, target = address(x_ref, _CHUNK), address(values_ref, _CHUNK // 2)
        chunks = []
        for offset in range(0, 2 * d, _PASS):
            is_column = simt.less(lane, const((2 * d - offset) // _CHUNK))
            inside = arith.andi(is_row, is_column)
            chunks.append((offset, inside, simt.load_words(source, offset, inside)))

        largest = eight_bits.largest([w for *_, words in chunks for w in words], dtype)
        scale, reciprocal = eight_bits.scale_and_reciprocal(largest)
        for offset, inside, words in chunks:
            mgpu.utils.inline_ptx(
                f"st.global.v2.b32 [$0 + {offset // 2}], {{$1, $2}};",
                target,
                *(eight_bits.rounded(words[i : i + 2], reciprocal, dtype) for i in (0, 2)),
                predicate=inside,
            )
        mgpu.utils.inline_ptx(
            "st.global.f32 [$0], $1;",
            simt.gmem_address(scale_ref, arith.muli(warp, const(4))),
            scale,
            predicate=arith.andi(is_row, simt.less(lane, const(1))),
        )

    step(x_ref, values_ref, scale_ref, count)

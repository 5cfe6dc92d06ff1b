"""Rounding of rows to 8-bit floats, a warp for each row, which stays in its registers."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.device import lanes, simt
from pallas_kernels.hopper.device.gather import SCALAR
from pallas_kernels.hopper.device.simt import const
from pallas_kernels.layouts import quantised

ROWS = 4  # of a warpgroup
_CHUNK = 16  # bytes that a lane loads at a time, of 8 numbers
_PASS = 32 * _CHUNK  # bytes that a warp loads at a time
_MAGNITUDES = 0x7FFF7FFF  # of two 16-bit floats; they are ordered as integers are, NaN last


def round_rows(x_ref, values_ref, scale_ref, count: jax.Array) -> None:
    """Rounds four rows as `layouts.quantised.rounded` does.

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

        scale, reciprocal = _scale(_largest([w for *_, words in chunks for w in words], dtype))
        for offset, inside, words in chunks:
            mgpu.utils.inline_ptx(
                f"st.global.v2.b32 [$0 + {offset // 2}], {{$1, $2}};",
                target,
                *(_rounded(words[i : i + 2], reciprocal, dtype) for i in (0, 2)),
                predicate=inside,
            )
        mgpu.utils.inline_ptx(
            "st.global.f32 [$0], $1;",
            simt.gmem_address(scale_ref, arith.muli(warp, const(4))),
            scale,
            predicate=arith.andi(is_row, simt.less(lane, const(1))),
        )

    step(x_ref, values_ref, scale_ref, count)


def _largest(words: list[ir.Value], dtype: jnp.dtype) -> ir.Value:
    """The largest magnitude of the numbers that a warp has in `words`, float32."""

    def larger(a, b):
        return lanes.ptx("max.u16x2 $0, $1, $2;", a, b)

    top = functools.reduce(larger, [arith.andi(w, const(_MAGNITUDES)) for w in words])
    for distance in (16, 8, 4, 2, 1):
        top = larger(top, mgpu.utils.shfl_bfly(top, distance))
    top = larger(top, lanes.ptx("prmt.b32 $0, $1, 0, 0x1032;", top))
    return _widened(top, dtype)[0]


def _scale(largest: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The scale for a row with this largest magnitude, and its reciprocal."""
    f32 = ir.F32Type.get()
    code = f"""{{.reg .pred is_zero, is_finite;
        setp.eq.f32 is_zero, $2, 0f00000000;
        testp.finite.f32 is_finite, $2;
        mul.rn.f32 $0, $2, {_literal(1 / quantised.LARGEST)};
        max.f32 $0, $0, {_literal(quantised.TINY)};
        selp.f32 $0, {_literal(1.0)}, $0, is_zero;
        selp.f32 $0, $0, {_literal(np.nan)}, is_finite;
        rcp.rn.f32 $1, $0;}}"""
    return tuple(mgpu.utils.inline_ptx(code, largest, result_types=[f32, f32]))


def _literal(value: float) -> str:
    return f"0f{int(np.float32(value).view(np.uint32)):08X}"


def _rounded(words: list[ir.Value], reciprocal: ir.Value, dtype: jnp.dtype) -> ir.Value:
    """The four numbers in two words, times `reciprocal`, as the four bytes of a word."""
    numbers = [number for word in words for number in _widened(word, dtype)]
    products = [arith.mulf(number, reciprocal) for number in numbers]
    return lanes.ptx(
        """{.reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};}""",
        *products,
    )


def _widened(word: ir.Value, dtype: jnp.dtype) -> list[ir.Value]:
    """The two 16-bit floats of a word as float32, the lower one first."""
    f32 = ir.F32Type.get()
    if dtype == jnp.bfloat16:
        bits = arith.shli(word, const(16)), arith.andi(word, const(-(1 << 16)))
        return [mgpu.utils.bitcast(b, f32) for b in bits]
    code = """{.reg .b16 low, high; mov.b32 {low, high}, $2;
        cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}"""
    return list(mgpu.utils.inline_ptx(code, word, result_types=[f32, f32]))

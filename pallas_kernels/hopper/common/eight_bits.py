"""Numbers in 8-bit floats (e4m3), lane by lane, for code inside `plgpu.inline_mgpu`.

What rounding means is in `quantised`. A word holds two 16-bit floats or four e4m3.
"""

import functools

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels import quantised
from pallas_kernels.hopper.common import lanes
from pallas_kernels.hopper.common.lanes import ptx
from pallas_kernels.hopper.common.simt import const

_MAGNITUDES = 0x7FFF7FFF  # of two 16-bit floats; they are ordered as integers are, NaN last


def largest(words: list[ir.Value], dtype: jnp.dtype, lanes: int = 32) -> ir.Value:
    """The largest magnitude in `words` of so many lanes of a warp, two 16-bit floats each, float32.

    NaN is larger than other magnitudes; its sign bit is 0, too.
    """
    top = larger(words)
    while lanes > 1:
        lanes //= 2
        top = larger([top, mgpu.utils.shfl_bfly(top, lanes)])
    top = larger([top, ptx("prmt.b32 $0, $1, 0, 0x1032;", top)])
    return widened(top, dtype)[0]


def larger(words: list[ir.Value]) -> ir.Value:
    """The largest magnitude of the lower halves of `words`, and that of their upper halves."""
    magnitudes = [arith.andi(word, const(_MAGNITUDES)) for word in words]
    return functools.reduce(functools.partial(lanes.of_halves, "max"), magnitudes)


def scale_and_reciprocal(largest: ir.Value) -> tuple[ir.Value, ir.Value]:
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


def rounded(words: list[ir.Value], reciprocal: ir.Value, dtype: jnp.dtype) -> ir.Value:
    """The four numbers in two words, times `reciprocal`, as the four bytes of a word."""
    numbers = [number for word in words for number in widened(word, dtype)]
    return packed([arith.mulf(number, reciprocal) for number in numbers])


def packed(numbers: list[ir.Value]) -> ir.Value:
    """Four float32 as the four bytes of a word."""
    return ptx(
        """{.reg .b16 low, high;
            cvt.rn.satfinite.e4m3x2.f32 low, $2, $1;
            cvt.rn.satfinite.e4m3x2.f32 high, $4, $3;
            mov.b32 $0, {low, high};}""",
        *numbers,
    )


def widened(word: ir.Value, dtype: jnp.dtype) -> list[ir.Value]:
    """The two 16-bit floats of a word as float32, the lower one first."""
    f32 = ir.F32Type.get()
    if dtype == jnp.bfloat16:
        bits = arith.shli(word, const(16)), arith.andi(word, const(-(1 << 16)))
        return [mgpu.utils.bitcast(b, f32) for b in bits]
    code = """{.reg .b16 low, high; mov.b32 {low, high}, $2;
        cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}"""
    return list(mgpu.utils.inline_ptx(code, word, result_types=[f32, f32]))


def from_e4m3(word: ir.Value) -> list[ir.Value]:
    """The four e4m3 of a word as float32, the lowest one first."""
    f32 = ir.F32Type.get()
    code = """{.reg .b16 low, high, a, b, c, d; .reg .b32 first, second;
        mov.b32 {low, high}, $4;
        cvt.rn.f16x2.e4m3x2 first, low; cvt.rn.f16x2.e4m3x2 second, high;
        mov.b32 {a, b}, first; mov.b32 {c, d}, second;
        cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; cvt.f32.f16 $2, c; cvt.f32.f16 $3, d;}"""
    return list(mgpu.utils.inline_ptx(code, word, result_types=4 * [f32]))

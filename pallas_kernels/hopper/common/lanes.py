"""The WGMMA accumulator layout, lane by lane, for code inside `plgpu.inline_mgpu`.

A warpgroup holds a float32 `[64, N]` array in the WGMMA accumulator layout (`plgpu.Layout.WGMMA`):
lane `l` of warp `w` has row `r = 16 w + l / 4` (its upper row) and row `r + 8` (its lower row), at
columns `8 j + 2 (l mod 4) + {0, 1}` for every `j`. A row thus lies in the four lanes of one quad. A
register holds one such pair of columns; registers alternate between upper and lower row.
"""

import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common.simt import const, is_from_hopper_on
from pallas_kernels.rectifiers import Rectifier

_PAIR = {jnp.dtype(jnp.bfloat16): "bf16x2", jnp.dtype(jnp.float16): "f16x2"}


def elements(register: ir.Value) -> list[ir.Value]:
    """The odd and the even column of a register that holds two float32."""
    return [vector.extract(register, [], [i]) for i in (1, 0)]


def gate_pair(rectifier: Rectifier, dtype: jnp.dtype, odd: ir.Value, even: ir.Value) -> ir.Value:
    """`rectifier.gate` of two `elements`, rounded to 16 bits, the odd one high. Keeps NaN."""
    kind = _PAIR[dtype]
    if rectifier.threshold:
        code = f"""{{.reg .b32 z, limit, opens; cvt.rn.{kind}.f32 z, $1, $2;
            mov.b32 limit, {0x00010001 * _largest_at_most(rectifier.threshold, dtype)};
            set.gtu.u32.{kind} opens, z, limit; and.b32 $0, z, opens;}}"""
    else:
        code = f"cvt.rn.relu.{kind}.f32 $0, $1, $2;"
    pair = ptx(code, odd, even)
    return ptx(f"mul.rn.{kind} $0, $1, $1;", pair) if rectifier.squared else pair


def _largest_at_most(threshold: float, dtype: jnp.dtype) -> int:
    """The bits of the largest 16-bit value that is not above `threshold`, which is above 0."""
    limit = np.float32(min(threshold, float(jnp.finfo(dtype).max)))  # as in `Rectifier.is_active`
    nearest = limit.astype(dtype)
    return int(nearest.view(np.uint16)) - int(nearest.astype(np.float32) > limit)


def of_halves(operation: str, a: ir.Value, b: ir.Value) -> ir.Value:
    """The "min" or "max" of the unsigned halves of two words."""
    if is_from_hopper_on():
        return ptx(f"{operation}.u16x2 $0, $1, $2;", a, b)
    code = f"""{{.reg .b16 low, high, x, y; mov.b32 {{low, high}}, $1; mov.b32 {{x, y}}, $2;
        {operation}.u16 low, low, x; {operation}.u16 high, high, y; mov.b32 $0, {{low, high}};}}"""
    return ptx(code, a, b)


def nonzero(x: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.ne, x, const(0))


def ballot(x: ir.Value) -> ir.Value:
    """An i32 with bit i set if `x` (i1) holds in lane i of the warp."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(
        "vote.sync.ballot.b32 $0, $1, -1;",
        x,
        result_types=i32,
        has_side_effects=True,
        convergent=True,
    )


def popcount(word: ir.Value) -> ir.Value:
    """How many bits of an i32 are set."""
    return mgpu.utils.inline_ptx("popc.b32 $0, $1;", word, result_types=word.type)


def ptx(code: str, *operands: ir.Value) -> ir.Value:
    """The i32 result of PTX `code`, which the compiler neither moves nor removes."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(code, *operands, result_types=i32, has_side_effects=True)


def store_row(address: ir.Value, pairs: list[ir.Value], quad_lane: ir.Value, is_used) -> None:
    """Stores a quad's row of 16-bit pairs to GMEM if `is_used`.

    The quad transposes its registers so that each lane stores 16 consecutive bytes: stores of 4
    bytes, which write parts of sectors, cost 0.06 ms (docs/design/0003-gate-matmuls-and-twell.md).

    Args:
      address: of the first columns of each lane, the first of which is 8 times `quad_lane`.
      pairs: of the row, which this lane has.
      quad_lane: the lane in its quad, i32.
      is_used: i1.
    """
    for j in range(0, len(pairs), 4):
        mgpu.utils.inline_ptx(
            f"st.global.v4.b32 [$0 + {16 * j}], {{$1, $2, $3, $4}};",
            address,
            *_quad_transpose(pairs[j : j + 4], quad_lane),
            predicate=is_used,
        )


def _quad_transpose(words: list[ir.Value], quad_lane: ir.Value) -> list[ir.Value]:
    """Transposes the quad's 4 x 4 words: word i of lane p becomes word p of lane i."""
    for distance in (1, 2):
        is_second = nonzero(arith.andi(quad_lane, const(distance)))
        for i in (i for i in range(4) if not i & distance):
            low, high = words[i], words[i + distance]
            received = mgpu.utils.shfl_bfly(arith.select(is_second, low, high), distance)
            words[i] = arith.select(is_second, received, low)
            words[i + distance] = arith.select(is_second, high, received)
    return words

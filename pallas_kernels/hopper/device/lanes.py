"""The WGMMA accumulator layout, lane by lane, for code inside `plgpu.inline_mgpu`.

A warpgroup holds a float32 `[64, N]` array in the WGMMA accumulator layout (`plgpu.Layout.WGMMA`):
lane `l` of warp `w` has row `r = 16 w + l / 4` (its upper row) and row `r + 8` (its lower row), at
columns `8 j + 2 (l mod 4) + {0, 1}` for every `j`. A row thus lies in the four lanes of one quad. A
register holds one such pair of columns; registers alternate between upper and lower row.
"""

import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.device.simt import const

RELU = {
    jnp.dtype(jnp.bfloat16): "cvt.rn.relu.bf16x2.f32 $0, $1, $2;",
    jnp.dtype(jnp.float16): "cvt.rn.relu.f16x2.f32 $0, $1, $2;",
}
"""PTX by dtype: ReLU of the two `elements`, rounded to 16 bits, the odd one high. Keeps NaN."""


def elements(register: ir.Value) -> list[ir.Value]:
    """The odd and the even column of a register that holds two float32."""
    return [vector.extract(register, [], [i]) for i in (1, 0)]


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


def ptx(code: str, *operands: ir.Value) -> ir.Value:
    """The i32 result of PTX `code`, which the compiler neither moves nor removes."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx(code, *operands, result_types=i32, has_side_effects=True)

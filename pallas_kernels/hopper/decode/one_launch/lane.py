"""Numbers that each lane of a warpgroup has for itself, one 32-bit word for each of its 128 lanes.

Arrays `[128]` in the layout `WORD` hold them, so that arithmetic is that of arrays. What lanes do
with each other are the functions here; `memory` has what they do with memory.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import eight_bits, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.quantised import E4M3

LANES, WARP, WARPS = 128, 32, 4
WORD = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
ptx = mgpu.utils.inline_ptx
_PAIRS = {"bfloat16": "bf16x2", "float16": "f16x2"}


def struct(dtype=jnp.int32) -> plgpu.ShapeDtypeStruct:
    """The type of a result."""
    return plgpu.ShapeDtypeStruct((LANES,), dtype, layout=WORD)


def word(array: mgpu.FragmentedArray) -> ir.Value:
    """This lane's number, inside `plgpu.inline_mgpu`."""
    (register,) = array.registers.flat
    return vector.extract(register, [], [0])


def scalar(array: mgpu.FragmentedArray) -> ir.Value:
    """A number that all lanes share, inside `plgpu.inline_mgpu`."""
    register = array.registers.flat[0]
    is_vector = isinstance(register.type, ir.VectorType)
    return vector.extract(register, [], [0]) if is_vector else register


def array(value: ir.Value) -> mgpu.FragmentedArray:
    """The result of `plgpu.inline_mgpu` in which each lane has its `value`, i32 or f32."""
    is_int = isinstance(value.type, ir.IntegerType)
    one = vector.broadcast(ir.VectorType.get((1,), value.type), value)
    registers = np.array([one], dtype=object)
    return mgpu.FragmentedArray(
        _registers=registers, _layout=WORD.to_mgpu(), _is_signed=True if is_int else None
    )


@primitive
def numbers() -> jax.Array:
    """The number of each lane in its warpgroup.

    It is read anew at each call. The compiler would otherwise compute all that follows from it
    before the first layer, and keep that in registers.
    """

    @plgpu.inline_mgpu(return_type=struct())
    def step(_):
        code = "{.reg .b32 t; mov.u32 t, %tid.x; and.b32 $0, t, 127;}"
        return array(ptx(code, result_types=const(0).type, has_side_effects=True))

    return step()


@numbers.in_jax
def _numbers():
    return jnp.arange(LANES, dtype=jnp.int32)


@primitive
def keep_loop() -> None:
    """At the beginning of a loop's body: the compiler does not unroll it.

    A kernel that does not fit into the instruction cache (128 KB) runs at half its speed.
    """

    @plgpu.inline_mgpu()
    def step(_):
        ptx('.pragma "nounroll";', has_side_effects=True)

    step()


@keep_loop.in_jax
def _keep_loop():
    pass


def full(value, dtype=jnp.int32) -> jax.Array:
    """The same number in all lanes."""
    return plgpu.layout_cast(jnp.full((LANES,), value, dtype), WORD)


def sum_of(values: jax.Array, lanes: int = WARP) -> jax.Array:
    """The sum of float32 over so many neighbouring lanes, a power of two up to 32, in each."""
    return sums_of([values], lanes)[0]


@primitive
def sums_of(values: list[jax.Array], lanes: int = WARP) -> list[jax.Array]:
    """`sum_of` of each; they wait for other lanes together."""
    n = len(values)

    @plgpu.inline_mgpu(arg_types=(n * [WORD],), return_type=n * [struct(jnp.float32)])
    def step(_, values):
        totals, distance = [word(one) for one in values], lanes // 2
        while distance:
            others = [
                ptx(
                    f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;",
                    total,
                    result_types=total.type,
                    convergent=True,
                    has_side_effects=True,
                )
                for total in totals
            ]
            totals = [arith.addf(*pair) for pair in zip(totals, others, strict=True)]
            distance //= 2
        return [array(total) for total in totals]

    return step(values)


@sums_of.in_jax
def _sums_of(values, lanes=WARP):
    return [jnp.repeat(jnp.sum(one.reshape(-1, lanes), axis=1), lanes) for one in values]


@primitive
def largest_of(tokens: list[list[jax.Array]], lanes: int = 4) -> list[jax.Array]:
    """Of each token the bits of the largest magnitude, float32, that so many neighbours have.

    The words hold two bfloat16 each. NaN is larger than all other magnitudes.
    """
    types = [len(words) * [WORD] for words in tokens]

    @plgpu.inline_mgpu(arg_types=(types,), return_type=len(tokens) * [struct()])
    def step(_, tokens):
        tops = [eight_bits.larger([word(one) for one in words]) for words in tokens]
        distance = lanes // 2
        while distance:
            others = [mgpu.utils.shfl_bfly(top, distance) for top in tops]
            tops = [eight_bits.larger(list(pair)) for pair in zip(tops, others, strict=True)]
            distance //= 2
        halves = [(arith.andi(top, const(0xFFFF)), arith.shrui(top, const(16))) for top in tops]
        return [array(arith.shli(arith.maxui(*pair), const(16))) for pair in halves]

    return step(tokens)


@largest_of.in_jax
def _largest_of(tokens, lanes=4):
    found = []
    for words in tokens:
        halves = [h for one in words for h in (one & 0x7FFF, (one >> 16) & 0x7FFF)]
        top = jnp.max(jnp.stack(halves).reshape(len(halves), -1, lanes), axis=(0, 2))
        found.append(jnp.repeat(top, lanes) << 16)
    return found


@primitive
def pack_four(values: list[jax.Array]) -> jax.Array:
    """Four float32, at most 448 in magnitude, as float8_e4m3fn in a word."""

    @plgpu.inline_mgpu(arg_types=(4 * [WORD],), return_type=struct())
    def step(_, values):
        return array(eight_bits.packed([word(one) for one in values]))

    return step(values)


@pack_four.in_jax
def _pack_four(values):
    return lax.bitcast_convert_type(jnp.stack(values, -1).astype(E4M3), jnp.int32)


@primitive
def unpack_four(words: jax.Array) -> list[jax.Array]:
    """The four float8_e4m3fn of a word, as float32."""

    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=4 * [struct(jnp.float32)])
    def step(_, words):
        return [array(one) for one in eight_bits.from_e4m3(word(words))]

    return step(words)


@unpack_four.in_jax
def _unpack_four(words):
    found = lax.bitcast_convert_type(words, E4M3).astype(jnp.float32)
    return [found[:, i] for i in range(4)]


@primitive
def sum_up_to(values: jax.Array) -> jax.Array:
    """The sum of int32 over the lanes of the warp up to this one."""

    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=struct())
    def step(_, values):
        lane, _ = simt.lane_and_warp()
        return array(simt.inclusive_sum(word(values), lane))

    return step(values)


@sum_up_to.in_jax
def _sum_up_to(values):
    return jnp.cumsum(values.reshape(WARPS, WARP), axis=1, dtype=jnp.int32).reshape(-1)


@primitive
def ballot(holds: jax.Array) -> jax.Array:
    """A bit for each lane of the warp, set where `holds` (int32) is not 0."""

    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=struct())
    def step(_, holds):
        bits = ptx(
            "{.reg .pred p; setp.ne.u32 p, $1, 0; vote.sync.ballot.b32 $0, p, -1;}",
            word(holds),
            result_types=const(0).type,
            convergent=True,
            has_side_effects=True,
        )
        return array(bits)

    return step(holds)


@ballot.in_jax
def _ballot(holds):
    bits = (holds != 0).reshape(WARPS, WARP).astype(jnp.uint32) << jnp.arange(32, dtype=jnp.uint32)
    return jnp.repeat(
        lax.bitcast_convert_type(jnp.sum(bits, axis=1, dtype=jnp.uint32), jnp.int32), 32
    )


@primitive
def popcount(values: jax.Array) -> jax.Array:
    """How many bits are set."""

    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=struct())
    def step(_, values):
        return array(ptx("popc.b32 $0, $1;", word(values), result_types=const(0).type))

    return step(values)


@popcount.in_jax
def _popcount(values):
    return lax.population_count(values)


@primitive
def pack(low: jax.Array, high: jax.Array, dtype=jnp.bfloat16) -> jax.Array:
    """Two float32 in a word, rounded to bfloat16 or float16."""
    kind = _PAIRS[jnp.dtype(dtype).name]

    @plgpu.inline_mgpu(arg_types=(WORD, WORD), return_type=struct())
    def step(_, low, high):
        packed = ptx(
            f"cvt.rn.{kind}.f32 $0, $2, $1;", word(low), word(high), result_types=const(0).type
        )
        return array(packed)

    return step(low, high)


@pack.in_jax
def _pack(low, high, dtype=jnp.bfloat16):
    halves = [lax.bitcast_convert_type(x.astype(dtype), jnp.uint16) for x in (low, high)]
    low, high = (half.astype(jnp.uint32) for half in halves)
    return lax.bitcast_convert_type(low | high << 16, jnp.int32)


@primitive
def times(words: list[jax.Array], others: list[jax.Array]) -> list[jax.Array]:
    """Products of words of two bfloat16 each, rounded once."""
    n = len(words)

    @plgpu.inline_mgpu(arg_types=(n * [WORD], n * [WORD]), return_type=n * [struct()])
    def step(_, words, others):
        pairs = zip(map(word, words), map(word, others), strict=True)
        of = const(0).type
        return [array(ptx("mul.rn.bf16x2 $0, $1, $2;", *pair, result_types=of)) for pair in pairs]

    return step(words, others)


@times.in_jax
def _times(words, others):
    found = []
    for one, other in zip(words, others, strict=True):
        (a, b), (c, d) = unpack(one), unpack(other)
        found.append(_pack(a * c, b * d))
    return found


@primitive
def sum_of_squares(words: list[jax.Array]) -> jax.Array:
    """The sum of the squares of two bfloat16 in each word, float32."""

    @plgpu.inline_mgpu(arg_types=(len(words) * [WORD],), return_type=struct(jnp.float32))
    def step(_, words):
        f32, fused = ir.F32Type.get(), {"fastmath": arith.FastMathFlags.contract}
        total = mgpu.c(0.0, f32)
        for one in map(word, words):
            halves = arith.shli(one, const(16)), arith.andi(one, const(-65536))
            low, high = (arith.bitcast(f32, half) for half in halves)
            low, high = (arith.mulf(half, half, **fused) for half in (low, high))
            total = arith.addf(total, arith.addf(low, high, **fused), **fused)
        return array(total)

    return step(words)


@sum_of_squares.in_jax
def _sum_of_squares(words):
    total = jnp.zeros(LANES, jnp.float32)
    for one in words:
        low, high = unpack(one)
        total += low * low + high * high
    return total


def unpack(words: jax.Array, dtype=jnp.bfloat16) -> tuple[jax.Array, jax.Array]:
    """The two numbers of a word, bfloat16 or float16, as float32."""
    if dtype == jnp.float16:
        low, high = _unpack_halves(words)
        return low, high
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    return low, lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)


@primitive
def _unpack_halves(words: jax.Array) -> list[jax.Array]:
    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=2 * [struct(jnp.float32)])
    def step(_, words):
        halves = ptx(
            """{.reg .b16 low, high; mov.b32 {low, high}, $2;
            cvt.f32.f16 $0, low; cvt.f32.f16 $1, high;}""",
            word(words),
            result_types=2 * [ir.F32Type.get()],
        )
        return [array(half) for half in halves]

    return step(words)


@_unpack_halves.in_jax
def __unpack_halves(words):
    halves = lax.bitcast_convert_type(words, jnp.float16).astype(jnp.float32)
    return [halves[..., i] for i in range(2)]


@primitive
def exp2(values: jax.Array) -> jax.Array:
    """2 to the power of float32."""

    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=struct(jnp.float32))
    def step(_, values):
        return array(ptx("ex2.approx.ftz.f32 $0, $1;", word(values), result_types=ir.F32Type.get()))

    return step(values)


@exp2.in_jax
def _exp2(values):
    return jnp.exp2(values)

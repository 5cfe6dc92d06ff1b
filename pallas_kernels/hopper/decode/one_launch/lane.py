"""Numbers that each lane of a warpgroup has for itself, one 32-bit word for each of its 128 lanes.

Arrays `[128]` in the layout `WORD` hold them, so that arithmetic is that of arrays. What lanes do
with memory and with each other are the functions here. Places count 32-bit words; a negative one
means that the lane takes no part.
"""

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import INT32, int32
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode import on_host

LANES, WARP, WARPS = 128, 32, 4
WORD = plgpu.Layout.WG_STRIDED((LANES,), vec_size=1)
ptx = mgpu.utils.inline_ptx


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


def full(value, dtype=jnp.int32) -> jax.Array:
    """The same number in all lanes."""
    return plgpu.layout_cast(jnp.full((LANES,), value, dtype), WORD)


@primitive
def gather(ref, places: jax.Array) -> jax.Array:
    """Words of SMEM `ref` (int32 or float32, row-major), 0 where `places` are negative."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD), return_type=struct(ref.dtype))
    def step(_, ref, places):
        place = word(places)
        address = arith.addi(simt.smem_address(ref), arith.muli(place, const(4)))
        is_float = isinstance(ir.MemRefType(ref.type).element_type, ir.F32Type)
        result = ir.F32Type.get() if is_float else const(0).type
        return array(
            ptx(
                "{.reg .pred p; .reg .b32 w; mov.b32 w, 0; setp.ge.s32 p, $2, 0; "
                "@p ld.shared.b32 w, [$1]; mov.b32 $0, w;}",
                address,
                place,
                result_types=result,
                has_side_effects=True,
            )
        )

    return step(ref, places)


@gather.in_jax
def _gather(ref, places):
    found = _memory(ref, places, jnp.zeros((0,), jnp.int32))
    return lax.bitcast_convert_type(found, ref.dtype)


@primitive
def gather_four(ref, places: jax.Array) -> list[jax.Array]:
    """Four words of SMEM `ref` (int32) from each of `places` on, which are multiples of four."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD), return_type=4 * [struct()])
    def step(_, ref, places):
        address = arith.addi(simt.smem_address(ref), arith.muli(word(places), const(4)))
        found = ptx(
            "{.reg .b32 a<4>; ld.shared.v4.b32 {a0, a1, a2, a3}, [$4]; "
            "mov.b32 $0, a0; mov.b32 $1, a1; mov.b32 $2, a2; mov.b32 $3, a3;}",
            address,
            result_types=[const(0).type] * 4,
            has_side_effects=True,
        )
        return [array(value) for value in found]

    return step(ref, places)


@gather_four.in_jax
def _gather_four(ref, places):
    return [_gather(ref, places + i) for i in range(4)]


@primitive
def scatter(ref, places: jax.Array, values: jax.Array) -> None:
    """Stores words to SMEM `ref` (int32 or float32, row-major)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD, WORD))
    def step(_, ref, places, values):
        place = word(places)
        ptx(
            "{.reg .pred p; setp.ge.s32 p, $2, 0; @p st.shared.b32 [$0], $1;}",
            arith.addi(simt.smem_address(ref), arith.muli(place, const(4))),
            word(values),
            place,
            has_side_effects=True,
        )

    step(ref, places, values)


@scatter.in_jax
def _scatter(ref, places, values):
    _memory(ref, places, lax.bitcast_convert_type(values, jnp.int32))


@primitive
def scatter_four(ref, places: jax.Array, values: list[jax.Array]) -> None:
    """Stores four words to SMEM `ref` (int32) from each of `places` on, multiples of four."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD, 4 * [WORD]))
    def step(_, ref, places, values):
        place = word(places)
        ptx(
            "{.reg .pred p; setp.ge.s32 p, $5, 0; @p st.shared.v4.b32 [$0], {$1, $2, $3, $4};}",
            arith.addi(simt.smem_address(ref), arith.muli(place, const(4))),
            *map(word, values),
            place,
            has_side_effects=True,
        )

    step(ref, places, values)


@scatter_four.in_jax
def _scatter_four(ref, places, values):
    for i, part in enumerate(values):
        _scatter(ref, jnp.where(places >= 0, places + i, -1), part)


@primitive
def number_at(ref, place: int) -> jax.Array:
    """The word of SMEM `ref` (int32, row-major) at a place, for all lanes, int32 scalar."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=INT32)
    def step(_, ref):
        return int32(simt.load_shared(simt.smem_address(ref), 4 * place))

    return step(ref)


@number_at.in_jax
def _number_at(ref, place):
    return _gather(ref, jnp.full((LANES,), place, jnp.int32))[0]


def _memory(ref, places, values):
    """For twins: the words of `ref` at `places`, behind what `values`, unless empty, puts there.

    The host has the memory, as the interpreter could only store one lane's word after the other;
    what `ref` itself has keeps the order of a warpgroup's accesses.
    """
    known: dict = on_host.shared("shared memory", dict)
    block, wg = lax.axis_index("block"), lax.axis_index("wg")
    size = int(np.prod(ref.shape))

    def access(_, block, places, values):
        places, values = np.asarray(places), np.asarray(values)
        # NaN, and no likely place or count
        words = known.setdefault((int(block), id(ref)), np.full(size, 0x7FC0BAD1, np.int32))
        is_there = places >= 0
        if np.any(places >= size):
            raise IndexError(f"place {places.max()} of {ref.shape}")
        if values.size:
            words[places[is_there]] = values[is_there]
        return np.where(is_there, words[np.maximum(places, 0)], 0)

    first = (*(len(ref.shape) - 1) * (0,), wg)
    before = ref[first]
    found = io_callback(access, struct_of(places), before, block, places, values)
    ref[first] = before + (found[0] * 0).astype(before.dtype)
    return found


def struct_of(places) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(places.shape, jnp.int32)


@primitive
def load(ref, places: jax.Array, count: int = 1) -> list[jax.Array]:
    """`count` (1, 2 or 4) words of GMEM `ref` from each of `places` on, multiples of `count`.

    Nothing may write them while the kernel runs. The loads are not waited for before the words are
    used. Zeros where places are negative.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD), return_type=count * [struct()])
    def step(_, ref, places):
        place = word(places)
        active = arith.cmpi(arith.CmpIPredicate.sge, place, const(0))
        wide = arith.extui(ir.IntegerType.get_signless(64), place)
        base = simt.gmem_address(ref, const(0))
        four = mgpu.c(4, ir.IntegerType.get_signless(64))
        address = arith.addi(base, arith.muli(wide, four))
        return [array(value) for value in simt.load_words(address, 0, active, count)]

    return step(ref, places)


@load.in_jax
def _load(ref, places, count=1):
    flat = _as_words(ref[...])
    found = [flat[jnp.maximum(places, 0) + i] for i in range(count)]
    return [jnp.where(places >= 0, value, 0) for value in found]


def _as_words(values: jax.Array) -> jax.Array:
    values = values.reshape(-1)
    if values.dtype.itemsize == 2:
        values = values.reshape(-1, 2)
    return lax.bitcast_convert_type(values, jnp.int32)


@primitive
def store(ref, places: jax.Array, values: jax.Array) -> None:
    """Stores words to GMEM `ref`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD, WORD))
    def step(_, ref, places, values):
        place = word(places)
        active = arith.cmpi(arith.CmpIPredicate.sge, place, const(0))
        simt.store_words(ref, place, [word(values)], active)

    step(ref, places, values)


@store.in_jax
def _store(ref, places, values):
    halves = lax.bitcast_convert_type(values, ref.dtype).reshape(-1)
    per_word = 4 // ref.dtype.itemsize

    @pl.loop(0, LANES * per_word)
    def _(i):
        lane = i // per_word

        @pl.when(places[lane] >= 0)
        def _():
            index, place = [], places[lane] * per_word + i % per_word
            for extent in reversed(ref.shape):
                index.append(place % extent)
                place = place // extent
            ref[tuple(reversed(index))] = halves[i]


@primitive
def sum_of(values: jax.Array, lanes: int = WARP) -> jax.Array:
    """The sum of float32 over so many neighbouring lanes, a power of two up to 32, in each."""

    @plgpu.inline_mgpu(arg_types=(WORD,), return_type=struct(jnp.float32))
    def step(_, values):
        total, distance = word(values), lanes // 2
        while distance:
            other = ptx(
                f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;",
                total,
                result_types=total.type,
                convergent=True,
                has_side_effects=True,
            )
            total, distance = arith.addf(total, other), distance // 2
        return array(total)

    return step(values)


@sum_of.in_jax
def _sum_of(values, lanes=WARP):
    return jnp.repeat(jnp.sum(values.reshape(-1, lanes), axis=1), lanes)


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
def pack(low: jax.Array, high: jax.Array) -> jax.Array:
    """Two float32 as bfloat16 in a word."""

    @plgpu.inline_mgpu(arg_types=(WORD, WORD), return_type=struct())
    def step(_, low, high):
        packed = ptx(
            "cvt.rn.bf16x2.f32 $0, $2, $1;", word(low), word(high), result_types=const(0).type
        )
        return array(packed)

    return step(low, high)


@pack.in_jax
def _pack(low, high):
    halves = [lax.bitcast_convert_type(x.astype(jnp.bfloat16), jnp.uint16) for x in (low, high)]
    low, high = (half.astype(jnp.uint32) for half in halves)
    return lax.bitcast_convert_type(low | high << 16, jnp.int32)


def unpack(words: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The two bfloat16 of a word, as float32."""
    low = lax.bitcast_convert_type(words << 16, jnp.float32)
    return low, lax.bitcast_convert_type(words & jnp.int32(-65536), jnp.float32)


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

"""What the lanes of a warpgroup do with memory, a word or more each; see `lane`.

Places count 32-bit words; a lane with a negative one takes no part.
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
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import INT32, int32
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode import on_host
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WORD, array, ptx, struct, word


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
def gather_each(ref, places: jax.Array, count: int, stride: int) -> list[jax.Array]:
    """`count` words of SMEM `ref`, `stride` words apart, the first at `places`, none negative."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD), return_type=count * [struct(ref.dtype)])
    def step(_, ref, places):
        address = arith.addi(simt.smem_address(ref), arith.muli(word(places), const(4)))
        is_float = isinstance(ir.MemRefType(ref.type).element_type, ir.F32Type)
        return [
            array(
                ptx(
                    f"ld.shared.b32 $0, [$1 + {4 * i * stride}];",
                    address,
                    result_types=ir.F32Type.get() if is_float else const(0).type,
                    has_side_effects=True,
                )
            )
            for i in range(count)
        ]

    return step(ref, places)


@gather_each.in_jax
def _gather_each(ref, places, count, stride):
    return [_gather(ref, places + i * stride) for i in range(count)]


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
        return np.where(is_there, words[np.maximum(places, 0)], 0), np.int32(0)

    first = (*(len(ref.shape) - 1) * (0,), wg)
    before = ref[first]
    # XLA would leave out a product with 0, and what waits for it.
    results = struct_of(places), jax.ShapeDtypeStruct((), jnp.int32)
    found, zero = io_callback(access, results, before, block, places, values)
    ref[first] = before + zero.astype(before.dtype)
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


@primitive
def load_row(
    ref,
    first: jax.Array,
    left: jax.Array | None,
    distances: list[int],
    count: int = 1,
    is_there: jax.Array | None = None,
) -> list[jax.Array]:
    """Like `load`, words of a row of GMEM `ref`, with less code.

    Args:
      ref: as of `load`.
      first: a place of each lane, a multiple of `count`.
      left: how many words the row has from there on; None if it has all.
      distances: of the words from `first`.
      count: how many words are loaded from each on.
      is_there: whether a lane has a row; None if all have.
    """
    ends, flags = ([] if one is None else [one] for one in (left, is_there))
    n = count * len(distances)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), WORD, len(ends) * [WORD], len(flags) * [WORD]),
        return_type=n * [struct()],
    )
    def step(_, ref, first, ends, flags):
        wide = arith.extui(ir.IntegerType.get_signless(64), word(first))
        four = mgpu.c(4, ir.IntegerType.get_signless(64))
        address = arith.addi(simt.gmem_address(ref, const(0)), arith.muli(wide, four))
        has_row = mgpu.c(1, ir.IntegerType.get_signless(1))
        if flags:
            has_row = arith.cmpi(arith.CmpIPredicate.ne, word(*flags), const(0))
        found = []
        for distance in distances:
            active = has_row
            for end in ends:
                is_in = arith.cmpi(arith.CmpIPredicate.sgt, word(end), const(distance))
                active = arith.andi(active, is_in)
            found += simt.load_words(address, 4 * distance, active, count)
        return [array(value) for value in found]

    return step(ref, first, ends, [flag.astype(jnp.int32) for flag in flags])


@load_row.in_jax
def _load_row(ref, first, left, distances, count=1, is_there=None):
    found = []
    for distance in distances:
        has = True if left is None else distance < left
        has = has if is_there is None else has & is_there
        found += _load(ref, jnp.where(has, first + distance, -1), count)
    return found


def _as_words(values: jax.Array) -> jax.Array:
    values = values.reshape(-1)
    if (per_word := 4 // values.dtype.itemsize) > 1:
        values = values.reshape(-1, per_word)
    return lax.bitcast_convert_type(values, jnp.int32)


@primitive
def store(ref, places: jax.Array, values: jax.Array, *, bytes_of: int = 4) -> None:
    """Stores words to GMEM `ref`, or with `bytes_of=2` their lower halves; places count these."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), WORD, WORD))
    def step(_, ref, places, values):
        place = word(places)
        if bytes_of == 4:
            active = arith.cmpi(arith.CmpIPredicate.sge, place, const(0))
            simt.store_words(ref, place, [word(values)], active)
            return
        ptx(
            "{.reg .pred p; .reg .b16 low, high; setp.ge.s32 p, $2, 0; mov.b32 {low, high}, $1; "
            "@p st.global.b16 [$0], low;}",
            simt.gmem_address(ref, arith.muli(place, const(2))),
            word(values),
            place,
            has_side_effects=True,
        )

    step(ref, places, values)


@store.in_jax
def _store(ref, places, values, *, bytes_of=4):
    per_word = bytes_of // ref.dtype.itemsize
    parts = lax.bitcast_convert_type(values, ref.dtype).reshape(LANES, -1)
    halves = parts[:, :per_word].reshape(-1)

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

"""Entries of neuron lists, stored from arrays in the accumulator layout.

A slot of a list holds a token's values for the list's 64 neurons. Few of them are not zero, so the
lists are filled with zeros first. Then each lane goes through its non-zeros alone, and stores one
after the other: of a warp's lanes, few have more than three among 64 tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import copies, engine, params, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import tiled
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS

_NEURONS = plgpu.Layout.WG_STRIDED((2 * 128,), vec_size=1)  # those of a lane's two rows


def _list_words(count: int):
    """The layout of what describes `count` times 32 tokens in the lists of a lane's two neurons."""
    return plgpu.Layout.WG_STRIDED((2 * 2 * count * 128,), vec_size=1)


def zeros(lists: NeuronLists, n: int, dtype: jax.typing.DTypeLike) -> list[jax.Array]:
    """`n` arrays `[C, 64]`, zero up to the end of the last list and unspecified after it."""
    (capacity,) = lists.tokens.shape

    def body(starts, lengths, *arrays_and_zeros):
        *arrays, zeros = arrays_and_zeros
        zeros[...] = jnp.zeros(zeros.shape, dtype)
        copies.commit()
        sm, sms, last = lax.axis_index("sm"), lax.axis_size("sm"), lengths.shape[0] - 1
        blocks = pl.cdiv(starts[last] + lengths[last], GROUP_NEURONS)

        @pl.loop(0, pl.cdiv(blocks - sm, sms))
        def _(i):
            for array in arrays:
                slots = pl.ds((sm + i * sms) * GROUP_NEURONS, GROUP_NEURONS)
                if engine.current().has_tma:
                    plgpu.copy_smem_to_gmem(zeros, array.at[slots])
                else:
                    array[slots] = jnp.zeros(zeros.shape, dtype)

        copies.await_stores(0)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((capacity, GROUP_NEURONS), dtype)] * n,
        scratch_types=[plgpu.SMEM((GROUP_NEURONS, GROUP_NEURONS), dtype)],
        grid=(sm_count(),),
        grid_names=("sm",),
        kernel_name="no_entries",
        compiler_params=params.ORDERED,
    )(lists.starts, lists.lengths)


@primitive
def load_neurons(neurons_ref):
    """Loads `neurons_ref` (GMEM, int32 `[64]`): each lane gets the neurons of its two rows."""
    result = plgpu.ShapeDtypeStruct((2 * 128,), jnp.int32, layout=_NEURONS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, neurons_ref):
        lane, warp = simt.lane_and_warp()
        row = arith.addi(arith.muli(warp, const(16)), arith.divui(lane, const(4)))
        address = simt.gmem_address(neurons_ref, arith.muli(row, const(4)))
        return simt.int_array(_load(address, 0, n=1) + _load(address, 32, n=1), _NEURONS)

    return step(neurons_ref)


@load_neurons.in_jax
def _(neurons_ref):
    return neurons_ref[...]


@primitive
def load_words(words_ref, neurons, first_word, count: int):
    """Loads the words that describe 32 or 64 tokens in the lists of a lane's two neurons.

    Args:
      words_ref: GMEM, int32 `[H / 64, T / 32, 2]`.
      neurons: from `load_neurons`; invalid ones are looked up in the last list.
      first_word: int32 scalar, the index on the axis T / 32 of the first 32 tokens.
      count: 1 or 2, the tokens over 32.
    """
    layout, (blocks, words, _) = _list_words(count), words_ref.shape
    result = plgpu.ShapeDtypeStruct((2 * 2 * count * 128,), jnp.int32, layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NEURONS, SCALAR), return_type=result)
    def step(_, words_ref, neurons, first_word):
        first = arith.muli(first_word.registers.item(), const(8))
        always = arith.constant(ir.IntegerType.get_signless(1), 1)
        loaded = []
        for neuron in _int_values(neurons):
            block = arith.minui(arith.shrui(neuron, const(6)), const(blocks - 1))
            offset = arith.addi(arith.muli(block, const(8 * words)), first)
            # Not `simt.load_words`, which the compiler may move to where the words are first used.
            loaded += simt.load_chunk(simt.gmem_address(words_ref, offset), 0, always, 2 * count)
        return simt.int_array(loaded, layout)

    return step(words_ref, neurons, first_word)


@load_words.in_jax
def _(words_ref, neurons, first_word, count):
    groups = neurons.astype(jnp.uint32) // GROUP_NEURONS
    words = words_ref[:, pl.ds(first_word, count)]
    return words[jnp.minimum(groups, len(words) - 1)]


@primitive
def scatter(entries, neurons, list_words, arrays, places) -> None:
    """Stores the non-zero elements of `arrays` to the lists.

    Args:
      entries: one GMEM `[C, 64]` for each array, 16-bit.
      neurons, list_words: from `load_neurons` for the rows, `load_words` for the columns.
      arrays: `[64, 32 or 64]` in the WGMMA layout, 16-bit. An element is not stored if it is zero
        in all of them, or if its slot is C or more.
      places: SMEM with transforms `tiled`, where this warpgroup has stored or read each array.
    """
    layouts = [plgpu.Layout.WGMMA] * len(arrays)
    targets = [plgpu.RefType()] * len(entries)
    (capacity, _), (_, columns) = entries[0].shape, arrays[0].shape
    sources = [plgpu.RefType(tiled(arrays[0].dtype, columns))] * len(places)
    list_layout, row_bytes = _list_words(columns // 32), 2 * columns

    @plgpu.inline_mgpu(arg_types=(targets, _NEURONS, list_layout, layouts, sources))
    def step(_, entries, neurons, list_words, arrays, places):
        lane, warp = simt.lane_and_warp()
        row = arith.shrui(lane, const(2))  # of the lane's two rows, among the warp's first 8
        column = arith.muli(arith.andi(lane, const(3)), const(2))  # of each 8
        first = arith.muli(arith.addi(arith.muli(warp, const(16)), row), const(row_bytes))
        first = arith.addi(first, arith.muli(column, const(2)))
        offsets = [
            arith.muli(arith.andi(neuron, const(GROUP_NEURONS - 1)), const(2))
            for neuron in _int_values(neurons)
        ]
        _store_marked(
            _marked(arrays),
            [simt.gmem_address(entry, const(0)) for entry in entries],
            [arith.addi(simt.smem_address(place), first) for place in places],
            _int_values(list_words),
            [*offsets, row, column],
            capacity,
            row_bytes,
        )

    step(entries, neurons, list_words, arrays, places)


@scatter.in_jax
def _(entries, neurons, list_words, arrays, places):
    del places
    bits, first_slots = list_words[..., :1], list_words[..., 1:]
    listed = bits >> jnp.arange(32) & 1  # of 64 neurons, 32 tokens of each word
    slots = (first_slots + jnp.cumsum(listed, axis=2) - listed).reshape(arrays[0].shape)
    is_stored = functools.reduce(jnp.logical_or, [a != 0 for a in arrays])
    is_stored &= slots < entries[0].shape[0]
    neuron, token = jnp.nonzero(is_stored, size=is_stored.size)

    @pl.loop(0, jnp.sum(is_stored))
    def _(i):
        n, t = neuron[i], token[i]
        for entry, array in zip(entries, arrays, strict=True):
            entry[slots[n, t], neurons[n] % GROUP_NEURONS] = array[n, t]


def _marked(arrays):
    """Which of a lane's elements are not zero in at least one of the arrays, i32.

    Bit `16 e + 8 r + j` is for row `r` of its two, and the element `e` of the two in the columns
    `8 j` to `8 j + 7`.
    """
    i32 = ir.IntegerType.get_signless(32)
    marked = const(0)
    for j in range(arrays[0].shape[1] // 8):
        for r in range(2):
            pairs = [mgpu.utils.bitcast(a.registers.flat[2 * j + r], i32) for a in arrays]
            pair = functools.reduce(arith.ori, pairs)
            # The highest bit of each half: whether the others, of which none is a sign, are not 0.
            pair = arith.addi(arith.andi(pair, const(0x7FFF7FFF)), const(0x7FFF7FFF))
            pair = arith.andi(pair, const(0x80008000 - 2**32))
            marked = arith.ori(marked, arith.shrui(pair, const(15 - 8 * r - j)))
    return marked


def _store_marked(marked, targets, sources, list_words, values, capacity, row_bytes):
    """Stores a lane's marked elements to their slots, one after the other.

    Args:
      marked: i32, as `_marked` returns it.
      targets: i64, the address of slot 0 in each array's list entries.
      sources: i32, the address in SMEM of the lane's first element of each array.
      list_words: i32: for both rows, once or twice, the word that says which of 32 tokens are in
        the list, and the first one's slot.
      values: i32: for both rows, the neuron's offset in a slot, in bytes; the lane's row and
        column.
      capacity: number of slots.
      row_bytes: of a row in SMEM, 64 or 128, whose pieces of 16 bytes are swizzled.
    """
    operands = [marked, *list_words, *values, *targets, *sources]
    names = [f"${i}" for i in range(len(operands))]
    mask, words, values = names[0], names[1:][: len(list_words)], names[1 + len(list_words) :]
    above, below, row, column, *addresses = values
    stores = "".join(
        f"""add.u32 x, {source}, place; ld.shared.b16 value, [x];
            add.u64 address, {target}, entry; @p st.global.b16 [address], value;"""
        for target, source in zip(addresses[: len(targets)], addresses[len(targets) :], strict=True)
    )
    of_rows = words[: len(words) // 2], words[len(words) // 2 :]
    bits, slots = (
        "".join(
            f"selp.b32 {into}, {of_rows[1][2 * word + i]}, {of_rows[0][2 * word + i]}, low;"
            for word, into in enumerate((name, "x")[: len(words) // 4])
        )
        + (f"selp.b32 {name}, x, {name}, right;" if len(words) == 8 else "")
        for i, name in enumerate(("bits", "slot"))
    )
    code = f"""{{.reg .pred p, low, right; .reg .b32 mask, bit, x, j, e, bits, slot, place;
        .reg .b64 entry, address; .reg .b16 value;
        mov.b32 mask, {mask};
        next: setp.eq.u32 p, mask, 0; @p bra done;
        bfind.u32 bit, mask; shl.b32 x, 1, bit; xor.b32 mask, mask, x;
        and.b32 j, bit, 7; shr.u32 e, bit, 4;
        and.b32 x, bit, 8; setp.ne.u32 low, x, 0;
        and.b32 x, bit, 4; setp.ne.u32 right, x, 0;
        {bits} {slots}
        and.b32 x, j, 3; mad.lo.u32 x, x, 8, e; add.u32 x, x, {column};
        shl.b32 x, 1, x; sub.u32 x, x, 1; and.b32 x, x, bits; popc.b32 x, x; add.u32 slot, slot, x;
        setp.lt.u32 p, slot, {capacity};
        selp.b32 x, {below}, {above}, low; cvt.u64.u32 entry, x;
        mad.wide.u32 entry, slot, {2 * GROUP_NEURONS}, entry;
        shr.u32 place, {row}, {128 // row_bytes - 1}; xor.b32 place, j, place;
        shl.b32 place, place, 4; mad.lo.u32 place, e, 2, place;
        @low add.u32 place, place, {8 * row_bytes};
        {stores}
        bra next; done:}}"""
    mgpu.utils.inline_ptx(code, *operands, has_side_effects=True)


def _load(address, offset, *, n):
    always = arith.constant(ir.IntegerType.get_signless(1), 1)
    return simt.load_words(address, offset, always, n)


def _int_values(array):
    i32 = ir.IntegerType.get_signless(32)
    return [mgpu.utils.bitcast(register, i32) for register in array.registers]

"""Gradients for the products z and u behind h on tile unions, from `dh = dy @ w_down^T`.

The matmul is an up projection of dy. Its epilogue computes dz = dh u act'(z) and du = dh g
(`rectifiers`). It overwrites g and h with them, for the gradient for x, and scatters them
and h into the neuron lists, for the gradients for the weights. Each non-zero entry of a list is a
store of its own.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels import in_place
from pallas_kernels.hopper.common import simt, support
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS, STAGE_K
from pallas_kernels.hopper.unions import gathered_matmul, row_copies
from pallas_kernels.hopper.unions.union_up import Item, describe_item
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, GROUP_NEURONS, TILE_TOKENS, Plan
from pallas_kernels.rectifiers import RELU, Rectifier

_PARTS = TILE_TOKENS // ACC_ROWS  # parts of 64 tokens in a chunk
_WORDS = 4  # int32 of `NeuronLists.words` that describe the 64 tokens of a part in a list
_NEURONS = plgpu.Layout.WG_STRIDED((2 * 128,), vec_size=1)  # those of a lane's two rows
_LIST_WORDS = plgpu.Layout.WG_STRIDED((2 * _WORDS * 128,), vec_size=1)


class _Operands(NamedTuple):
    """What the kernel reads, and what it changes.

    Attributes:
      item_count, items, neurons, sizes: of the plan.
      l1_grad: float32 `[1]`.
      list_words: `NeuronLists.words`.
      entries: `[C, 64]` for h and each gradient, to be filled.
      extra: `[items, 128, 256]`, or None.
      hidden: `[items, 128 or 256, 256]`, to be overwritten.
      dy: `[M rounded up to a multiple of 8, D]`.
      w_down: `[H, D]`.
    """

    item_count: Any
    items: Any
    neurons: Any
    sizes: Any
    l1_grad: Any
    list_words: Any
    entries: list
    extra: Any
    hidden: Any
    dy: Any
    w_down: Any

    def blocks_of_a_part(self) -> list:
        """Arrays of which a part takes a stage each, in this order."""
        return [self.hidden] if self.extra is None else [self.extra, self.hidden]


def hidden_grads(
    dy: jax.Array,
    w_down: jax.Array,
    h_ref: jax.Ref,
    l1_grad: jax.Array,
    plan: Plan,
    lists: NeuronLists,
    rectifier: Rectifier = RELU,
    extra: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Replaces gates and h by the gradients for z and u; scatters these and h into the lists.

    Sums in float32; the gradients are rounded once, and are 0 where the gate is 0.

    Args:
      dy: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_down: `[H, D]`, H a multiple of 128 up to 65536.
      h_ref: mutable `[items, 256, 256]`, in the non-gated form `[items, 128, 256]`: h, with the
        gates above it, as `union_up` returns it.
      l1_grad: float32 `[1]`, the gradient for the sum of |h|.
      plan: the unions.
      lists: with C slots; they hold at least the non-zeros of the gate.
      rectifier: what made the gate.
      extra: `[items, 128, 256]`, in chunks like h, what the gradient for h has besides; finite also
        outside the unions. None: nothing.

    Returns:
      h, dz and, in the gated form, du: `[C, 64]` each, on the lists; zeros elsewhere up to the end
      of the last list, rounded up to 64 slots, and unspecified after it.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_down", w_down)
    support.check_array("dy", dy, (dy.shape[0], w_down.shape[1]), w_down.dtype)
    support.check_array(
        "plan.neurons", plan.neurons, (pl.cdiv(dy.shape[0], TILE_TOKENS), len(w_down)), jnp.int32
    )
    support.check_array("l1_grad", l1_grad, (1,), jnp.float32)
    rows = h_ref.shape[1]
    if rows not in (CHUNK_NEURONS, 2 * CHUNK_NEURONS):
        raise ValueError(f"h_ref must be [items, 128 or 256, 256], got {list(h_ref.shape)}")
    support.check_array("h_ref", h_ref, (plan.items.size, rows, TILE_TOKENS), w_down.dtype)
    if extra is not None:
        blocks = plan.items.size, CHUNK_NEURONS, TILE_TOKENS
        support.check_array("extra", extra, blocks, w_down.dtype)
    dy = jnp.pad(dy, ((0, -dy.shape[0] % 8), (0, 0)))  # for the tiling of its copies
    plan, lists, l1_grad, dy, w_down = in_place.barrier((plan, lists, l1_grad, dy, w_down))
    entries = [
        in_place.mutable(a) for a in _no_entries(lists, 1 + rows // CHUNK_NEURONS, w_down.dtype)
    ]
    gathered_matmul.gathered_matmul(
        _Operands(
            plan.item_count,
            plan.items,
            plan.neurons,
            plan.sizes,
            l1_grad,
            lists.words,
            entries,
            extra,
            h_ref,
            dy,
            w_down,
        ),
        job_type=Item,
        jobs=lambda operands: operands.item_count[0],
        describe=describe_item,
        produce=_produce,
        consume=functools.partial(_consume, rectifier),
        a_shape=(CONSUMERS * ACC_ROWS, STAGE_K),
        b_shape=(TILE_TOKENS, STAGE_K),
        dtype=w_down.dtype,
        out_type=(),
        name="hidden_grads",
    )
    return tuple(in_place.contents(entry) for entry in entries)


def _no_entries(lists: NeuronLists, n: int, dtype):
    """`n` arrays `[C, 64]`, zero up to the end of the last list and unspecified after it."""
    (capacity,) = lists.tokens.shape

    def body(starts, lengths, *arrays_and_zeros):
        *arrays, zeros = arrays_and_zeros
        zeros[...] = jnp.zeros(zeros.shape, dtype)
        plgpu.commit_smem()
        sm, sms, last = lax.axis_index("sm"), lax.axis_size("sm"), lengths.shape[0] - 1
        blocks = pl.cdiv(starts[last] + lengths[last], GROUP_NEURONS)

        @pl.loop(0, pl.cdiv(blocks - sm, sms))
        def _(i):
            for array in arrays:
                slots = pl.ds((sm + i * sms) * GROUP_NEURONS, GROUP_NEURONS)
                plgpu.copy_smem_to_gmem(zeros, array.at[slots])

        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=[jax.ShapeDtypeStruct((capacity, GROUP_NEURONS), dtype)] * n,
        scratch_types=[plgpu.SMEM((GROUP_NEURONS, GROUP_NEURONS), dtype)],
        grid=(sm_count(),),
        grid_names=("sm",),
        kernel_name="no_entries",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )(lists.starts, lists.lengths)


def _produce(item, ring, step, operands):
    chunk = pl.ds(item.first, CHUNK_NEURONS)
    indices = row_copies.load_indices(operands.neurons.at[item.tile, chunk])

    def put_part(part, step):
        for blocks in operands.blocks_of_a_part():

            def fill(_, b, loaded, blocks=blocks):
                block = blocks.at[item.job, :, pl.ds(part * ACC_ROWS, ACC_ROWS)]
                plgpu.copy_gmem_to_smem(block, b.at[pl.ds(0, blocks.shape[1])], loaded)

            ring.put(step, fill)
            step += 1
        return step

    first_row = item.tile * TILE_TOKENS
    step = ring.put_product(step, operands.dy, first_row, operands.w_down, indices, item.limit)
    return lax.fori_loop(0, _PARTS, put_part, step)


def _consume(rectifier, item, ring, step, warpgroup, buffers, operands):
    hidden, dtype = operands.hidden, operands.dy.dtype
    mine = pl.ds(item.first + warpgroup * ACC_ROWS, ACC_ROWS)
    neurons = _load_neurons(operands.neurons.at[item.tile, mine])
    first_word = item.tile * TILE_TOKENS // 32
    # Each part's words are loaded before something long, as the fences of `write` wait for loads.
    list_words = _load_list_words(operands.list_words, neurons, first_word)
    l1 = operands.l1_grad[0]
    steps = operands.dy.shape[1] // STAGE_K
    products = ring.multiply_product(step, steps, warpgroup, item.limit)
    step += steps
    taken = len(operands.blocks_of_a_part())  # stages of a part
    for part in range(_PARTS):
        first_stage = step + taken * part
        dh = products[:, part * ACC_ROWS : (part + 1) * ACC_ROWS]
        *with_extra, with_hidden = range(taken)
        for stage in with_extra:  # before gates and h, as these need registers
            _, b = ring.take(first_stage + stage)
            dh += b[pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)].astype(jnp.float32)
        _, b = ring.take(first_stage + with_hidden)
        starts = [
            f * CHUNK_NEURONS + warpgroup * ACC_ROWS
            for f in range(hidden.shape[1] // CHUNK_NEURONS)
        ]
        *gate, value = [b[pl.ds(start, ACC_ROWS)].astype(jnp.float32) for start in starts]
        grads = rectifier.gradients(dh, gate[0] if gate else None, value, l1)
        grads = [a.astype(dtype) for a in grads]
        columns = pl.ds(part * ACC_ROWS, ACC_ROWS)
        targets = [hidden.at[item.job, pl.ds(start, ACC_ROWS), columns] for start in starts]
        gathered_matmul.write(grads, buffers, part, targets)
        for stage in range(taken):  # after the fence of the writes, as TMA will fill them again
            ring.release(first_stage + stage)
        if part + 1 < _PARTS:
            next_word = first_word + (part + 1) * _WORDS // 2
            next_words = _load_list_words(operands.list_words, neurons, next_word)
        _scatter(operands.entries, neurons, list_words, [value.astype(dtype), *grads])
        list_words = next_words
    return step + taken * _PARTS


@primitive
def _load_neurons(neurons_ref):
    """Loads `neurons_ref` (GMEM, int32 `[64]`): each lane gets the neurons of its two rows."""
    result = plgpu.ShapeDtypeStruct((2 * 128,), jnp.int32, layout=_NEURONS)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, neurons_ref):
        lane, warp = simt.lane_and_warp()
        row = arith.addi(arith.muli(warp, const(16)), arith.divui(lane, const(4)))
        address = simt.gmem_address(neurons_ref, arith.muli(row, const(4)))
        return simt.int_array(_load(address, 0, n=1) + _load(address, 32, n=1), _NEURONS)

    return step(neurons_ref)


@_load_neurons.in_jax
def _(neurons_ref):
    return neurons_ref[...]


@primitive
def _load_list_words(words_ref, neurons, first_word):
    """Loads the words that describe 64 tokens in the lists of a lane's two neurons.

    Args:
      words_ref: GMEM, int32 `[H / 64, T / 32, 2]`.
      neurons: from `_load_neurons`; invalid ones are looked up in the last list.
      first_word: int32 scalar, the index on the axis T / 32 of the first 32 tokens.
    """
    result = plgpu.ShapeDtypeStruct((2 * _WORDS * 128,), jnp.int32, layout=_LIST_WORDS)
    blocks, words, _ = words_ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _NEURONS, SCALAR), return_type=result)
    def step(_, words_ref, neurons, first_word):
        first = arith.muli(first_word.registers.item(), const(8))
        always = arith.constant(ir.IntegerType.get_signless(1), 1)
        loaded = []
        for neuron in _int_values(neurons):
            block = arith.minui(arith.shrui(neuron, const(6)), const(blocks - 1))
            offset = arith.addi(arith.muli(block, const(8 * words)), first)
            # Not `load_words`, which the compiler may move to where the words are first used.
            loaded += simt.load_chunk(simt.gmem_address(words_ref, offset), 0, always)
        return simt.int_array(loaded, _LIST_WORDS)

    return step(words_ref, neurons, first_word)


@_load_list_words.in_jax
def _(words_ref, neurons, first_word):
    groups = neurons.astype(jnp.uint32) // GROUP_NEURONS
    words = words_ref[:, pl.ds(first_word, 2)]
    return words[jnp.minimum(groups, len(words) - 1)]


@primitive
def _scatter(entries, neurons, list_words, arrays) -> None:
    """Stores the non-zero elements of `arrays` to the lists.

    Args:
      entries: one GMEM `[C, 64]` for each array, 16-bit.
      neurons, list_words: from `_load_neurons` for the rows, `_load_list_words` for the columns.
      arrays: `[64, 64]` in the WGMMA layout, 16-bit. An element is not stored if it is zero in all
        of them, or if its slot is C or more.
    """
    refs, layouts = [plgpu.RefType()] * len(entries), [plgpu.Layout.WGMMA] * len(arrays)
    capacity = entries[0].shape[0]

    @plgpu.inline_mgpu(arg_types=(refs, _NEURONS, _LIST_WORDS, layouts))
    def step(_, entries, neurons, list_words, arrays):
        i32 = ir.IntegerType.get_signless(32)
        lane, _ = simt.lane_and_warp()
        column = arith.muli(arith.remui(lane, const(4)), const(2))
        list_words = _int_values(list_words)
        # Bits of the tokens before this lane's first one, among the first 8 tokens of a word.
        below = arith.subi(arith.shli(const(1), column), const(1))
        for row, neuron in enumerate(_int_values(neurons)):
            offset = arith.muli(arith.andi(neuron, const(GROUP_NEURONS - 1)), const(2))
            targets = [simt.gmem_address(entry, offset) for entry in entries]
            for j in range(ACC_ROWS // 8):
                word = row * _WORDS + j // 4 * 2
                shift = j % 4 * 8
                mask = arith.ori(arith.shli(below, const(shift)), const((1 << shift) - 1))
                pairs = [mgpu.utils.bitcast(a.registers.flat[2 * j + row], i32) for a in arrays]
                _store_pair(targets, pairs, list_words[word], list_words[word + 1], mask, capacity)

    step(entries, neurons, list_words, arrays)


@_scatter.in_jax
def _(entries, neurons, list_words, arrays):
    bits, first_slots = list_words[..., :1], list_words[..., 1:]
    listed = bits >> jnp.arange(32) & 1  # of 64 neurons, 32 tokens of each of two words
    slots = (first_slots + jnp.cumsum(listed, axis=2) - listed).reshape(arrays[0].shape)
    is_stored = functools.reduce(jnp.logical_or, [a != 0 for a in arrays])
    is_stored &= slots < entries[0].shape[0]
    neuron, token = jnp.nonzero(is_stored, size=is_stored.size)

    @pl.loop(0, jnp.sum(is_stored))
    def _(i):
        n, t = neuron[i], token[i]
        for entry, array in zip(entries, arrays, strict=True):
            entry[slots[n, t], neurons[n] % GROUP_NEURONS] = array[n, t]


def _store_pair(targets, pairs, bits, first_slot, mask, capacity):
    """Stores two neighbouring elements of each array to their slots.

    Args:
      targets: i64, the address of this neuron in slot 0 of each array's list entries.
      pairs: i32, two elements of each array.
      bits, first_slot: i32, which of 32 tokens are in the list, and the first one's slot.
      mask: i32, the bits below the first element's token.
      capacity: number of slots.
    """
    n = len(pairs)
    bits_arg, slot_arg, mask_arg = 2 * n, 2 * n + 1, 2 * n + 2
    any_of = " ".join(f"or.b32 any, any, ${n + i};" for i in range(1, n))
    element = """
        and.b32 x, any, {half}; setp.ne.u32 p, x, 0;
        and.b32 x, ${bits}, below; popc.b32 x, x; add.u32 slot, x, ${slot};
        setp.lt.and.u32 p, slot, {capacity}, p;"""
    store = """mad.wide.u32 address, slot, {row_bytes}, ${target};
        mov.b32 {{near, far}}, ${pair}; @p st.global.b16 [address], {half};"""
    code = f"""{{.reg .pred p; .reg .b32 any, x, below, slot; .reg .b64 address;
        .reg .b16 near, far;
        mov.b32 any, ${n}; {any_of} and.b32 any, any, 0x7FFF7FFF;
        setp.eq.u32 p, any, 0; @p bra done;
        mov.b32 below, ${mask_arg};"""
    for half_mask, half in (("0xFFFF", "near"), ("0xFFFF0000", "far")):
        code += element.format(half=half_mask, bits=bits_arg, slot=slot_arg, capacity=capacity)
        for i in range(n):
            code += store.format(row_bytes=2 * GROUP_NEURONS, target=i, pair=n + i, half=half)
        code += "shl.b32 below, below, 1; or.b32 below, below, 1;"
    mgpu.utils.inline_ptx(
        code + " done:}", *targets, *pairs, bits, first_slot, mask, has_side_effects=True
    )


def _load(address, offset, *, n):
    always = arith.constant(ir.IntegerType.get_signless(1), 1)
    return simt.load_words(address, offset, always, n)


def _int_values(array):
    i32 = ir.IntegerType.get_signless(32)
    return [mgpu.utils.bitcast(register, i32) for register in array.registers]

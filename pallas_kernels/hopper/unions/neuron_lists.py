"""Lists the tokens for which any of a group of 64 neurons is active.

One kernel finds a group's tokens, as bits, and counts them. In the next, each thread block goes
through the lengths of all lists, and knows where its own begins and how many are longer.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from pallas_kernels import in_place
from pallas_kernels.hopper.common import lanes, params, simt, support
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.layouts.neuron_lists import SLOT_ALIGNMENT, NeuronLists, slots_for
from pallas_kernels.layouts.tile_union import TILE_TOKENS, to_words

_WARPS = 4
_ROUNDS = 4  # words of 32 tokens that a lane of `_count` takes at a time
_BLOCK_WORDS = 32 * _WARPS  # that a thread block of `_fill` takes
_SCRATCH_WORDS = _ROUNDS * _WARPS


def neuron_lists(counts: jax.Array, m: int, capacity: int) -> tuple[NeuronLists, jax.Array]:
    """Lists the tokens of each group of neurons.

    Args:
      counts: uint8 `[H / 64, R * 256]`, R = ceil(m / 256), H a multiple of 128 up to 65536, as
        `gate_union` returns it: token t is in list b if the low 7 bits of `[b, t]` are not 0.
      m: number of tokens; those from m on are in no list.
      capacity: C, a multiple of 64.

    Returns:
      lists: if they need more than C slots, they are cut off at slot C: they lack some tokens, but
        kernels may still take them.
      lengths: int32 `[H / 64]`, how long each would be without a limit.

    Raises:
      ValueError: if a shape, a dtype or the capacity is not as above.
    """
    groups, padded_m = len(counts), pl.cdiv(m, TILE_TOKENS) * TILE_TOKENS
    support.check_array("counts", counts, (groups, padded_m), jnp.uint8)
    if capacity < SLOT_ALIGNMENT or capacity % SLOT_ALIGNMENT:
        raise ValueError(
            f"capacity must be a positive multiple of {SLOT_ALIGNMENT}, got {capacity}"
        )
    words = jax.ShapeDtypeStruct((groups, padded_m // 32, 2), jnp.int32)
    by_group = jax.ShapeDtypeStruct((groups,), jnp.int32)
    count = plgpu.kernel(
        functools.partial(_count_kernel, m),
        out_type=(words, by_group),
        scratch_types=dict(scratch=plgpu.SMEM((_SCRATCH_WORDS,), jnp.int32)),
        grid=(groups,),
        grid_names=("group",),
        kernel_name="count_lists",
        compiler_params=params.UNORDERED,
    )
    counted = in_place.barrier(count(in_place.barrier(counts)))
    fill = plgpu.kernel(
        _fill_kernel,
        out_type=(
            jax.ShapeDtypeStruct((capacity,), jnp.int32),
            by_group,
            by_group,
            words,
            by_group,
        ),
        grid=(groups, pl.cdiv(padded_m // 32, _BLOCK_WORDS)),
        grid_names=("group", "part"),
        kernel_name="neuron_lists",
        compiler_params=params.UNORDERED,
    )
    return NeuronLists(*in_place.barrier(fill(*counted))), counted[1]


def _count_kernel(m, counts, words, lengths, *, scratch):
    _count(counts, lax.axis_index("group"), m, words, lengths, scratch)


def _fill_kernel(found, all_lengths, *lists):
    group, part = lax.axis_index("group"), lax.axis_index("part")
    _fill(found, all_lengths, group, part, NeuronLists(*lists))


@primitive
def _count(counts_ref, group, m: int, words_ref, lengths_ref, scratch_ref) -> None:
    """Finds and counts the tokens of a group.

    Args:
      counts_ref: GMEM, uint8 `[H / 64, T]`, as of `neuron_lists`.
      group: int32 scalar, the number of the group.
      m: number of tokens.
      words_ref: GMEM, int32 `[H / 64, T / 32, 2]`: row `group` gets the bits of the tokens, 32 in a
        word, and how many there are before these.
      lengths_ref: GMEM, int32 `[H / 64]`, gets the number of all.
      scratch_ref: SMEM, int32 `[_SCRATCH_WORDS]`.
    """
    columns = counts_ref.shape[1]
    words = columns // 32
    step_words = _ROUNDS * _BLOCK_WORDS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, *3 * [plgpu.RefType()]))
    def step(_, counts_ref, group, words_ref, lengths_ref, scratch_ref):
        group, scratch = group.registers.item(), simt.smem_address(scratch_ref)
        lane, warp = simt.lane_and_warp()
        thread = arith.addi(arith.muli(warp, const(32)), lane)
        index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        loop = scf.ForOp(
            mgpu.c(0, index), mgpu.c(words, index), mgpu.c(step_words, index), [const(0)]
        )
        with ir.InsertionPoint(loop.body):
            first = arith.addi(arith.index_cast(i32, loop.induction_variable), thread)
            (before,) = loop.inner_iter_args
            mine = [arith.addi(first, const(_BLOCK_WORDS * i)) for i in range(_ROUNDS)]
            row = arith.muli(group, const(columns))
            loaded = [_load_counts(counts_ref, row, word, words) for word in mine]
            bits = [
                arith.andi(_bits(counts), _first_bits(m, word))
                for counts, word in zip(loaded, mine, strict=True)
            ]
            starts, total = _sums_before([lanes.popcount(b) for b in bits], lane, warp, scratch)
            for word, some, start in zip(mine, bits, starts, strict=True):
                place = arith.addi(arith.muli(group, const(words)), word)
                pair = [some, arith.addi(before, start)]
                simt.store_words(
                    words_ref, arith.muli(place, const(2)), pair, simt.less(word, const(words))
                )
            scf.YieldOp([arith.addi(before, total)])
        simt.store_words(lengths_ref, group, [loop.results[0]], simt.is_first_thread())

    step(counts_ref, group, words_ref, lengths_ref, scratch_ref)


@_count.in_jax
def _(counts_ref, group, m, words_ref, lengths_ref, scratch_ref):
    used = (counts_ref[group] & 127 != 0) & (jnp.arange(counts_ref.shape[1]) < m)
    in_word = used.reshape(-1, 32).sum(axis=1, dtype=jnp.int32)
    bits = lax.bitcast_convert_type(to_words(used), jnp.int32)
    words_ref[group] = jnp.stack([bits, jnp.cumsum(in_word) - in_word], axis=-1)
    lengths_ref[group] = jnp.sum(in_word)


def _load_counts(counts_ref, row, word, words: int):
    """The counts of 32 tokens, four in an i32; zeros past the last word."""
    address = simt.gmem_address(counts_ref, arith.addi(row, arith.muli(word, const(32))))
    is_word = simt.less(word, const(words))
    return [a for offset in (0, 16) for a in simt.load_words(address, offset, is_word)]


def _bits(counts):
    """A word with a bit for each of 32 counts: whether their low 7 bits are not all 0."""
    bits = const(0)
    for i, four in enumerate(counts):
        low = arith.addi(arith.andi(four, const(0x7F7F7F7F)), const(0x7F7F7F7F))
        ones = arith.andi(arith.shrui(low, const(7)), const(0x01010101))
        nibble = arith.shrui(arith.muli(ones, const(0x10204080)), const(28))
        bits = arith.ori(bits, arith.shli(nibble, const(4 * i)))
    return bits


def _first_bits(m: int, word):
    """The bits of a word's tokens below m. PTX has no bits to shift from 32 on, unlike MLIR."""
    rest = arith.maxsi(arith.subi(const(m), arith.muli(word, const(32))), const(0))
    return lanes.ptx("shl.b32 $0, 1, $1; sub.u32 $0, $0, 1;", rest)


def _sums_before(numbers, lane, warp, scratch):
    """For each of a lane's numbers the sum of those before it, and the sum of all.

    The first numbers of all lanes come first, then the second ones, and so on.
    """
    inclusive = [simt.inclusive_sum(x, lane) for x in numbers]
    is_last = simt.equal(lane, const(31))
    for i, x in enumerate(inclusive):
        address = arith.addi(scratch, arith.muli(warp, const(4)))
        mgpu.utils.inline_ptx(
            f"@$2 st.shared.b32 [$0 + {4 * _WARPS * i}], $1;",
            address,
            x,
            is_last,
            has_side_effects=True,
        )
    mgpu.warpgroup_barrier()
    sums, total = [], const(0)
    for i, (x, number) in enumerate(zip(inclusive, numbers, strict=True)):
        start = arith.addi(total, arith.subi(x, number))
        for w in range(_WARPS):
            of_warp = simt.load_shared(scratch, 4 * (_WARPS * i + w))
            is_before = simt.less(const(w), warp)
            start = arith.addi(start, arith.select(is_before, of_warp, const(0)))
            total = arith.addi(total, of_warp)
        sums.append(start)
    mgpu.warpgroup_barrier()  # until all have read what the next round overwrites
    return sums, total


@primitive
def _fill(found_ref, all_lengths_ref, group, part, lists: NeuronLists) -> None:
    """Stores a part of a list where it belongs; the first part also says where that is.

    Args:
      found_ref, all_lengths_ref: GMEM, as `_count` fills them.
      group: int32 scalar, the number of the group.
      part: int32 scalar: of its words, those from `part * _BLOCK_WORDS` on.
      lists: references to its arrays in GMEM.
    """
    (groups,), (capacity,) = all_lengths_ref.shape, lists.tokens.shape
    words_in_list = found_ref.shape[1]
    refs = lists.tokens, lists.starts, lists.lengths, lists.words, lists.order
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(ref, ref, SCALAR, SCALAR, (ref,) * len(refs)))
    def step(_, found, all_lengths, group, part, refs):
        tokens, starts, lengths, words, order = refs
        group, part = group.registers.item(), part.registers.item()
        lane, warp = simt.lane_and_warp()
        length = _load(all_lengths, group)
        start, rank = _start_and_rank(all_lengths, groups, group, length, lane)

        is_first = arith.andi(simt.is_first_thread(), simt.less(part, const(1)))
        clipped = arith.minui(start, const(capacity))
        rest = arith.subi(const(capacity), clipped)
        simt.store_words(starts, group, [clipped], is_first)
        simt.store_words(lengths, group, [arith.minui(length, rest)], is_first)
        simt.store_words(order, rank, [group], is_first)

        first = arith.addi(arith.muli(part, const(_BLOCK_WORDS)), arith.muli(warp, const(32)))
        word = arith.addi(first, lane)
        place = arith.addi(arith.muli(group, const(words_in_list)), word)
        is_word = simt.less(word, const(words_in_list))
        address = simt.gmem_address(found, arith.muli(place, const(8)))
        bits, before = simt.load_words(address, 0, is_word, n=2)
        slot = arith.addi(start, before)
        simt.store_words(words, arith.muli(place, const(2)), [bits, slot], is_word)
        _store_tokens(tokens, first, bits, slot, lane, capacity)

    step(found_ref, all_lengths_ref, group, part, refs)


@_fill.in_jax
def _(found_ref, all_lengths_ref, group, part, lists):
    found, lengths, capacity = found_ref[group], all_lengths_ref[...], lists.tokens.size
    other = jnp.arange(lengths.size)
    start = jnp.sum(jnp.where(other < group, slots_for(lengths), 0))
    comes_first = (lengths > lengths[group]) | ((lengths == lengths[group]) & (other < group))
    lists.starts[group] = clipped = jnp.minimum(start, capacity)
    lists.lengths[group] = jnp.minimum(lengths[group], capacity - clipped)
    lists.order[jnp.sum(comes_first)] = group
    lists.words[group] = found.at[:, 1].add(start)
    bits = (found[:, :1] >> jnp.arange(32)) & 1 != 0
    bits &= (jnp.arange(len(found)) // _BLOCK_WORDS == part)[:, None]
    place = start + found[:, 1:] + jnp.cumsum(bits, axis=1) - bits
    place = jnp.where(bits, place, capacity).reshape(-1)
    lists.tokens[...] = lists.tokens[...].at[place].set(jnp.arange(place.size), mode="drop")


def _start_and_rank(all_lengths_ref, groups, group, length, lane):
    """The first slot of a list, and how many lists are longer, or as long and before it."""
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    loop = scf.ForOp(
        mgpu.c(0, index), mgpu.c(groups, index), mgpu.c(32, index), [const(0), const(0)]
    )
    with ir.InsertionPoint(loop.body):
        other = arith.addi(arith.index_cast(i32, loop.induction_variable), lane)
        start, rank = loop.inner_iter_args
        is_list = simt.less(other, const(groups))
        theirs = _load(all_lengths_ref, other, is_list)
        is_before = simt.less(other, group)
        slots = arith.addi(theirs, const(SLOT_ALIGNMENT - 1))
        slots = arith.andi(slots, const(-SLOT_ALIGNMENT))
        is_equal = simt.equal(theirs, length)
        comes_first = arith.ori(simt.less(length, theirs), arith.andi(is_equal, is_before))
        comes_first = arith.andi(comes_first, is_list)
        start = arith.addi(start, arith.select(is_before, slots, const(0)))
        scf.YieldOp([start, arith.addi(rank, arith.extui(i32, comes_first))])
    return [simt.warp_sum(x) for x in loop.results]


def _store_tokens(tokens_ref, first_word, bits, slot, lane, capacity: int):
    """A warp stores the tokens of 32 words, of which each lane has one, to their slots."""
    below = arith.subi(arith.shli(const(1), lane), const(1))
    for source in range(32):
        some = simt.from_lane(bits, const(source))
        earlier = lanes.popcount(arith.andi(some, below))
        place = arith.addi(simt.from_lane(slot, const(source)), earlier)
        token = arith.addi(arith.muli(arith.addi(first_word, const(source)), const(32)), lane)
        is_listed = lanes.nonzero(arith.andi(arith.shrui(some, lane), const(1)))
        simt.store_words(
            tokens_ref, place, [token], arith.andi(is_listed, simt.less(place, const(capacity)))
        )


def _load(ref, place, active=None):
    always = arith.constant(ir.IntegerType.get_signless(1), 1)
    address = simt.gmem_address(ref, arith.muli(place, const(4)))
    (word,) = simt.load_words(address, 0, always if active is None else active, n=1)
    return word

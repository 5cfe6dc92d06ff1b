"""The lists of the tokens that use a group of neurons, lane by lane; see `layouts.neuron_lists`."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from pallas_kernels.hopper.common import lanes, simt
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.layouts.neuron_lists import ROOM_SLOTS, NeuronLists

_WARPS = 4
_ROUNDS = 4  # words of 32 tokens that a lane of `count` takes at a time
BLOCK_WORDS = 32 * _WARPS  # that a block of `fill` takes
SCRATCH_WORDS = _ROUNDS * _WARPS


def count(counts_ref, group, m: int, words_ref, lengths_ref, scratch_ref) -> None:
    """Finds and counts the tokens of a group.

    Args:
      counts_ref: GMEM, uint8 `[H / 64, T]`, as of `neuron_lists`.
      group: int32 scalar, the number of the group.
      m: number of tokens.
      words_ref: GMEM, int32 `[H / 64, T / 32, 2]`: row `group` gets the bits of the tokens, 32 in a
        word, and how many there are before these.
      lengths_ref: GMEM, int32 `[H / 64]`, gets the number of all.
      scratch_ref: SMEM, int32 `[SCRATCH_WORDS]`.
    """
    columns = counts_ref.shape[1]
    words = columns // 32
    step_words = _ROUNDS * BLOCK_WORDS

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
            mine = [arith.addi(first, const(BLOCK_WORDS * i)) for i in range(_ROUNDS)]
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
    is_last = arith.cmpi(arith.CmpIPredicate.eq, lane, const(31))
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
            of_warp = mgpu.utils.inline_ptx(
                f"ld.shared.b32 $0, [$1 + {4 * (_WARPS * i + w)}];",
                scratch,
                result_types=x.type,
                has_side_effects=True,
            )
            is_before = simt.less(const(w), warp)
            start = arith.addi(start, arith.select(is_before, of_warp, const(0)))
            total = arith.addi(total, of_warp)
        sums.append(start)
    mgpu.warpgroup_barrier()  # until all have read what the next round overwrites
    return sums, total


def fill(found_ref, all_lengths_ref, group, part, lists: NeuronLists) -> None:
    """Stores a part of a list where it belongs; the first part also says where that is.

    Args:
      found_ref, all_lengths_ref: GMEM, as `count` fills them.
      group: int32 scalar, the number of the group.
      part: int32 scalar: of its words, those from `part * BLOCK_WORDS` on.
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

        first = arith.addi(arith.muli(part, const(BLOCK_WORDS)), arith.muli(warp, const(32)))
        word = arith.addi(first, lane)
        place = arith.addi(arith.muli(group, const(words_in_list)), word)
        is_word = simt.less(word, const(words_in_list))
        address = simt.gmem_address(found, arith.muli(place, const(8)))
        bits, before = simt.load_words(address, 0, is_word, n=2)
        slot = arith.addi(start, before)
        simt.store_words(words, arith.muli(place, const(2)), [bits, slot], is_word)
        _store_tokens(tokens, first, bits, slot, lane, capacity)

    step(found_ref, all_lengths_ref, group, part, refs)


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
        room = arith.andi(arith.addi(theirs, const(ROOM_SLOTS - 1)), const(-ROOM_SLOTS))
        is_equal = arith.cmpi(arith.CmpIPredicate.eq, theirs, length)
        comes_first = arith.ori(simt.less(length, theirs), arith.andi(is_equal, is_before))
        comes_first = arith.andi(comes_first, is_list)
        start = arith.addi(start, arith.select(is_before, room, const(0)))
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

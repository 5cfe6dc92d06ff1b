"""What tokens do in each row tile, and what follows for its union.

The kernel counts for one tile what `tile_union.tokens_of_tiles` does for all; `union_plan` comes
behind it. `decide` goes through what was counted for a tile and all before it, as
`tile_union.decide` does with sums over tiles.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from pallas_kernels.hopper.common import lanes, params, scalars, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import INT32, SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, DENSE_COST, OUTLYING_ABOVE, TILE_TOKENS

_WARPS = 4
_LANE_TOKENS = 8  # neighbouring tokens of a lane
_WORDS = 8  # of a lane: its tokens' sums and their largest counts, two 16-bit numbers in each
_SCRATCH_WORDS = _WARPS * 32 * _WORDS
_LOADS = 8  # groups whose counts a lane loads at a time

# Columns of the statistics of a tile, int32.
EVERY, USUAL, OUTLYING, NOT_FINITE = range(4)


def tile_stats(
    masks: jax.Array, counts: jax.Array, m: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Counts what tokens do in each row tile.

    Args:
      masks: uint32 `[2, R, H / 32]`, R = ceil(m / 256), H a multiple of 128 up to 65536.
      counts: uint8 `[H / 64, R * 256]`.
      m: number of tokens.

    Returns:
      stats: int32 `[R, 4]`, of `tile_union.stats_of_tiles`: neurons that are active for
        any token, for any that is not outlying, outlying tokens, tokens that are not finite.
      bits: uint32 `[R, 2, 8]`, bits of these tokens.
      nnz: int32 `[R * 256]`; past m, anything.
    """
    tiles = masks.shape[1]
    kernel = plgpu.kernel(
        functools.partial(_kernel, m),
        out_type=(
            jax.ShapeDtypeStruct((tiles, 4), jnp.int32),
            jax.ShapeDtypeStruct((tiles, 2, 8), jnp.uint32),
            jax.ShapeDtypeStruct((counts.shape[1],), jnp.int32),
        ),
        scratch_types=dict(scratch=plgpu.SMEM((_SCRATCH_WORDS,), jnp.uint32)),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="tile_stats",
        compiler_params=params.UNORDERED,
    )
    return kernel(masks, counts)


def _kernel(m, masks, counts, stats, bits, nnz, *, scratch):
    tile = lax.axis_index("tile")
    _describe(masks, counts, tile, m, stats, bits, nnz, scratch)


@primitive
def _describe(masks_ref, counts_ref, tile, m: int, stats_ref, bits_ref, nnz_ref, scratch_ref):
    """Counts the neurons of a tile's union, the non-zeros of its tokens, and those that may leave.

    Args:
      masks_ref, counts_ref: GMEM, as of `tile_union`.
      tile: int32 scalar, the number of the tile.
      m: number of tokens.
      stats_ref: GMEM, int32 `[R, 4]`; row `tile` gets the neurons that are active for any token,
        those for any that is not outlying, the outlying tokens, and those that are not finite.
      bits_ref: GMEM, uint32 `[R, 2, 8]`, gets bits of these tokens.
      nnz_ref: GMEM, int32 `[R * 256]`, gets the non-zeros of each token; past m, anything.
      scratch_ref: SMEM, uint32 `[_SCRATCH_WORDS]`.
    """
    arg_types = 2 * [plgpu.RefType()] + [SCALAR] + 4 * [plgpu.RefType()]

    @plgpu.inline_mgpu(arg_types=arg_types)
    def step(_, masks_ref, counts_ref, tile, stats_ref, bits_ref, nnz_ref, scratch_ref):
        tile = tile.registers.item()
        lane, warp = simt.lane_and_warp()
        sizes = [_bits_set(masks_ref, i, tile, lane) for i in range(2)]
        found = _sum_groups(counts_ref, tile, lane, warp)
        sums, tops = _of_all_warps(found, lane, warp, simt.smem_address(scratch_ref))

        first = arith.addi(arith.muli(tile, const(TILE_TOKENS)), arith.muli(lane, const(8)))
        outlying = not_finite = const(0)
        for i, top in enumerate(tops):
            is_token = simt.less(arith.addi(first, const(i)), const(m))
            is_over = arith.andi(simt.less(const(OUTLYING_ABOVE), top), is_token)
            is_infinite = arith.andi(simt.less(const(127), top), is_token)
            bit = const(1 << i)
            not_finite = arith.ori(not_finite, arith.select(is_infinite, bit, const(0)))
            outlying = arith.ori(outlying, arith.select(is_over, bit, const(0)))
        outlying = arith.andi(outlying, arith.xori(not_finite, const(-1)))

        is_first_warp = simt.equal(warp, const(0))
        for i, some in enumerate((outlying, not_finite)):
            _store_bits(bits_ref, i, tile, some, lane, is_first_warp)
        for i in (0, 4):
            simt.store_words(nnz_ref, arith.addi(first, const(i)), sums[i : i + 4], is_first_warp)
        tokens = [simt.warp_sum(lanes.popcount(bits)) for bits in (outlying, not_finite)]
        row = arith.muli(tile, const(4))
        simt.store_words(stats_ref, row, [*sizes, *tokens], simt.is_first_thread())

    step(masks_ref, counts_ref, tile, stats_ref, bits_ref, nnz_ref, scratch_ref)


@_describe.in_jax
def _(masks_ref, counts_ref, tile, m, stats_ref, bits_ref, nnz_ref, scratch_ref):
    masks, counts = masks_ref[...], counts_ref[...]
    _, _, *tokens = tile_union.tokens_of_tiles(masks, counts, m)
    stats_ref[tile] = tile_union.stats_of_tiles(masks, counts, m)[tile]
    bits_ref[tile] = tile_union.to_words(jnp.stack([some[tile] for some in tokens]))
    nnz = jnp.sum(counts & 127, axis=0, dtype=jnp.int32)
    mine = pl.ds(tile * TILE_TOKENS, TILE_TOKENS)
    nnz_ref[mine] = lax.dynamic_slice(nnz, (mine.start,), (TILE_TOKENS,))


def _bits_set(masks_ref, i: int, tile, lane):
    """How many bits of `masks[i, tile]` are set."""
    _, tiles, words = ir.MemRefType(masks_ref.type).shape
    row = arith.muli(arith.addi(tile, const(i * tiles)), const(4 * words))
    address = simt.gmem_address(masks_ref, arith.addi(row, arith.muli(lane, const(4))))
    total = const(0)
    for start in range(0, words, 32):
        (word,) = simt.load_words(address, 4 * start, simt.less(lane, const(words - start)), n=1)
        total = arith.addi(total, lanes.popcount(word))
    return simt.warp_sum(total)


def _sum_groups(counts_ref, tile, lane, warp):
    """Sums and largest counts of this lane's tokens over every fourth group.

    Words of two 16-bit numbers: for either half of the tokens the sums of the even and of the odd
    ones, then the same of the largest counts.
    """
    groups, columns = ir.MemRefType(counts_ref.type).shape
    index, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
    column = arith.addi(arith.muli(tile, const(TILE_TOKENS)), arith.muli(lane, const(_LANE_TOKENS)))
    loop = scf.ForOp(
        arith.index_cast(index, warp),
        mgpu.c(groups, index),
        mgpu.c(_WARPS * _LOADS, index),
        [const(0)] * _WORDS,
    )
    with ir.InsertionPoint(loop.body):
        first = arith.index_cast(i32, loop.induction_variable)
        loaded = []
        for i in range(_LOADS):
            group = arith.addi(first, const(_WARPS * i))
            offset = arith.addi(arith.muli(group, const(columns)), column)
            is_group = simt.less(group, const(groups))
            address = simt.gmem_address(counts_ref, offset)
            loaded.append(simt.load_words(address, 0, is_group, n=2))
        sums, tops = list(loop.inner_iter_args)[:4], list(loop.inner_iter_args)[4:]
        for words in loaded:
            for half, word in enumerate(words):
                for odd in range(2):
                    pair = arith.andi(arith.shrui(word, const(8 * odd)), const(0x00FF00FF))
                    count = arith.andi(pair, const(0x007F007F))
                    at = 2 * half + odd
                    sums[at] = arith.addi(sums[at], count)
                    tops[at] = lanes.of_halves("max", tops[at], pair)
        scf.YieldOp([*sums, *tops])
    return list(loop.results)


def _of_all_warps(found, lane, warp, scratch):
    """The sums, and the largest counts, of this lane's tokens over all groups, in every warp."""

    def words_of(warp):
        row = arith.addi(arith.muli(warp, const(32)), lane)
        return arith.addi(scratch, arith.muli(row, const(4 * _WORDS)))

    mine = words_of(warp)
    for i in range(0, _WORDS, 4):
        mgpu.utils.inline_ptx(
            f"st.shared.v4.b32 [$0 + {4 * i}], {{$1, $2, $3, $4}};",
            mine,
            *found[i : i + 4],
            has_side_effects=True,
        )
    mgpu.warpgroup_barrier()
    sums = tops = [const(0)] * _LANE_TOKENS
    for w in range(_WARPS):
        words = []
        for i in range(0, _WORDS, 4):
            words += mgpu.utils.inline_ptx(
                f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4 + {4 * i}];",
                words_of(const(w)),
                result_types=[ir.IntegerType.get_signless(32)] * 4,
                has_side_effects=True,
            )
        sums = [arith.addi(a, b) for a, b in zip(sums, _tokens_of(words[:4]), strict=True)]
        tops = [arith.maxui(a, b) for a, b in zip(tops, _tokens_of(words[4:]), strict=True)]
    return sums, tops


def _tokens_of(words):
    """The eight numbers in words of either half's even and odd tokens, token by token."""
    numbers = []
    for even, odd in (words[:2], words[2:]):
        for shift in (0, 16):
            numbers += [
                arith.andi(arith.shrui(word, const(shift)), const(0xFFFF)) for word in (even, odd)
            ]
    return numbers


def _store_bits(bits_ref, i: int, tile, bits, lane, active):
    """Stores the 256 bits of which each lane has 8 to `bits[tile, i]`."""
    word = arith.shli(bits, arith.muli(arith.andi(lane, const(3)), const(8)))
    for distance in (1, 2):
        word = arith.ori(word, mgpu.utils.shfl_bfly(word, distance))
    is_first = simt.equal(arith.andi(lane, const(3)), const(0))
    row = arith.addi(arith.muli(tile, const(16)), const(8 * i))
    place = arith.addi(row, arith.shrui(lane, const(2)))
    simt.store_words(bits_ref, place, [word], arith.andi(active, is_first))


class Decision(NamedTuple):
    """What is decided for a tile; int32 scalars.

    Attributes:
      leave: 1 if the outlying tokens leave, else 0.
      fits: 1 if the items of its union fit, else 0: then all tokens leave.
      size: neurons in its union.
      own_items, own_heavy: its items, and the tokens that leave.
      items, heavy: those of all tiles up to this one.
      needed, infinite: of these tiles, as of `tile_union.needs_of`.
    """

    leave: jax.Array
    fits: jax.Array
    size: jax.Array
    own_items: jax.Array
    own_heavy: jax.Array
    items: jax.Array
    heavy: jax.Array
    needed: jax.Array
    infinite: jax.Array


@primitive
def decide(stats_ref, tile, m: int, h: int, max_items: int, max_heavy: int | None) -> Decision:
    """Decides for a tile; see `tile_union.decide`.

    Args:
      stats_ref: GMEM, int32 `[R, 4]`, from `_describe`.
      tile: int32 scalar, the number of the tile.
      m: number of tokens.
      h: number of neurons.
      max_items, max_heavy: as of `tile_union.decide`.
    """
    found = len(Decision._fields) + 2

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *8 * [SCALAR]), return_type=[INT32] * found)
    def step(_, stats_ref, first, tile, *before):
        first, tile, *before = (a.registers.item() for a in (first, tile, *before))
        lane, _ = simt.lane_and_warp()
        mine = arith.addi(first, lane)
        is_tile = arith.cmpi(arith.CmpIPredicate.ule, mine, tile)
        address = simt.gmem_address(stats_ref, arith.muli(mine, const(16)))
        stats = simt.load_chunk(address, 0, is_tile)
        tokens = arith.minui(
            const(TILE_TOKENS), arith.subi(const(m), arith.muli(mine, const(TILE_TOKENS)))
        )
        tokens = arith.select(is_tile, tokens, const(0))
        limits = m, max_items, max_heavy
        decided, sums = _decide_by_lane(stats, tokens, h, *limits, before, lane)
        last = arith.minui(const(31), arith.subi(tile, first))
        results = [simt.from_lane(word, last) for word in (*decided, *sums)]
        return [scalars.int32(word) for word in results]

    def body(i, carry):
        return tuple(step(stats_ref, i * 32, tile, *carry[-6:]))

    *decision, _, _ = lax.fori_loop(0, tile // 32 + 1, body, (jnp.int32(0),) * found)
    return Decision(*decision)


@decide.in_jax
def _(stats_ref, tile, m, h, max_items, max_heavy):
    every, usual, outlying, not_finite = stats_ref[...].T
    leave = tile_union.who_leaves(every, usual, outlying, h, max_heavy)
    sizes = jnp.where(leave, usual, every)
    chunks = -(-sizes // CHUNK_NEURONS)
    fits = jnp.cumsum(chunks) <= max_items
    tokens = jnp.minimum(TILE_TOKENS, m - TILE_TOKENS * jnp.arange(len(every)))
    items = jnp.where(fits, chunks, 0)
    heavy = jnp.where(fits, jnp.where(leave, outlying, 0) + not_finite, tokens)
    needed = tile_union.chunks_needed(every, usual, outlying, h)
    sums = map(jnp.cumsum, (items, heavy, needed, not_finite))
    own = leave, fits, jnp.where(fits, sizes, 0), items, heavy, *sums
    return Decision(*(a[tile].astype(jnp.int32) for a in own))


def _decide_by_lane(stats, tokens, h, m, max_items, max_heavy, before, lane):
    """What is decided for each lane's tile, and sums over tiles: `before`, continued."""
    items, heavy, needed, infinite, left, wanted = before
    saved = arith.muli(
        arith.subi(stats[EVERY], stats[USUAL]), const(TILE_TOKENS * DENSE_COST.denominator)
    )
    cost = arith.muli(stats[OUTLYING], const(h * DENSE_COST.numerator))
    leave = simt.less(cost, saved)
    left = _continued(left, arith.select(leave, stats[OUTLYING], const(0)), lane)

    def of_those_up_to(most):
        may_leave = arith.andi(leave, simt.less(left, const(most + 1)))
        size = arith.select(may_leave, stats[USUAL], stats[EVERY])
        chunks = arith.addi(size, const(CHUNK_NEURONS - 1))
        return may_leave, size, arith.divui(chunks, const(CHUNK_NEURONS))

    *_, at_most = of_those_up_to(tile_union.MAX_HEAVY)
    leave, size, chunks = of_those_up_to(m if max_heavy is None else max_heavy)
    wanted = _continued(wanted, chunks, lane)
    fits = simt.less(wanted, const(max_items + 1))
    own_items = arith.select(fits, chunks, const(0))
    leaving = arith.select(leave, stats[OUTLYING], const(0))
    own_heavy = arith.select(fits, arith.addi(leaving, stats[NOT_FINITE]), tokens)
    flags = [arith.select(flag, const(1), const(0)) for flag in (leave, fits)]
    decided = [*flags, arith.select(fits, size, const(0)), own_items, own_heavy]
    added = (items, own_items), (heavy, own_heavy), (needed, at_most), (infinite, stats[NOT_FINITE])
    return decided, [*(_continued(before, x, lane) for before, x in added), left, wanted]


def _continued(before, x, lane):
    return arith.addi(before, simt.inclusive_sum(x, lane))

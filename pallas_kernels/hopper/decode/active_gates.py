"""How many gates of a token are active: counted by the thread blocks that compute them.

The values of 16 neurons for all tokens are an array as in `token_columns`. Numbers lie in GMEM as
in `hopper.decode.active_counts`: int32, a byte for each of four tokens.
"""

import functools
import itertools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import lanes, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode import token_columns, words
from pallas_kernels.hopper.decode.token_columns import COLUMNS


@primitive
def store(numbers_ref, votes: int) -> None:
    """Stores the numbers of a tile: the sum of its votes, and that no gate is active.

    `numbers_ref`: `[1 + M / 4]`.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, numbers_ref):
        (stride,), _ = ir.MemRefType(numbers_ref.type).get_strides_and_offset()
        (rows,) = ir.MemRefType(numbers_ref.type).shape
        thread = arith.andi(mgpu.thread_idx(), const(127))
        value = arith.select(simt.less(thread, const(1)), const(votes), const(0))
        place = arith.muli(thread, const(stride))
        simt.store_words(numbers_ref, place, [value], simt.less(thread, const(rows)))

    step(numbers_ref)


@store.in_jax
def _store(numbers_ref, votes):
    numbers_ref[...] = jnp.zeros(numbers_ref.shape, jnp.int32).at[0].set(votes)


@primitive
def count(values: jax.Array, tokens: int, counts_ref) -> jax.Array:
    """Counts the values of each token that are not zero; NaN is not zero.

    Args:
      values: float32.
      tokens: only the first so many are looked at.
      counts_ref: `[M / 4]`, of the tile; gets the numbers added.

    Returns:
      int32 scalar, other in each warp: the most that one of the warp's tokens has.
    """
    arguments = token_columns.layout(values.size // COLUMNS), plgpu.RefType()
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=arguments, return_type=result)
    def step(_, values, counts_ref):
        column, token = token_columns.column_and_token()
        lane, _ = simt.lane_and_warp()
        zero = mgpu.c(0.0, ir.F32Type.get())
        # The first lane of a token's 16 adds up their bits.
        token_bits = arith.shli(const(0xFFFF), arith.andi(lane, const(16)))
        (stride,), _ = ir.MemRefType(counts_ref.type).get_strides_and_offset()
        row, byte = arith.shrui(token, const(2)), arith.andi(token, const(3))
        of_token = simt.gmem_address(counts_ref, arith.muli(row, const(4 * stride)))
        shift = arith.muli(byte, const(8))
        is_first, most = simt.less(column, const(1)), const(0)
        for i, register in enumerate(values.registers.flat):
            is_active = arith.andi(
                arith.cmpf(arith.CmpFPredicate.UNE, token_columns.element(register), zero),
                simt.less(token, const(max(0, tokens - 8 * i))),
            )
            bits = arith.andi(lanes.ballot(is_active), token_bits)
            number = lanes.popcount(bits)
            mgpu.utils.inline_ptx(
                f"red.global.add.u32 [$0 + {8 * stride * i}], $1;",
                of_token,
                arith.shli(number, shift),
                predicate=arith.andi(is_first, lanes.nonzero(bits)),
            )
            most = arith.maxui(most, number)
        return mgpu.FragmentedArray.splat(simt.warp_max(most), (), is_signed=True)

    return step(values, counts_ref)


@count.in_jax
def _count(values, tokens, counts_ref):
    """The interpreter has no atomic additions, so `counts_ref` stays as it is."""
    del counts_ref
    active = values.reshape(-1, COLUMNS)[:tokens] != 0
    return jnp.max(jnp.sum(active, axis=1, dtype=jnp.int32))


@primitive
def has(most: jax.Array, number: int) -> jax.Array:
    """Whether a token has so many of a block's 16 gates active, given `most` of `count`: bool
    scalar. All warps have arrived then."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=result)
    def step(_, most):
        has = any_thread(simt.less(const(number - 1), most.registers.item()))
        return mgpu.FragmentedArray.splat(has, (), is_signed=False)

    return step(most)


@has.in_jax
def _has(most, number):
    return most >= number


@primitive
def load(counts_ref) -> jax.Array:
    """The numbers of all tiles, `[M / 4, tiles]`, int32 `[128 * words]`: each warp has every fourth
    row, and its lanes take turns with tiles. The loads stay behind `await_previous`."""
    rows, tiles = counts_ref.shape
    size = words.WARPS * words.WARP * pl.cdiv(rows, words.WARPS) * pl.cdiv(tiles, words.WARP)
    result = plgpu.ShapeDtypeStruct((size,), jnp.int32, layout=words.layout(size))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, counts_ref):
        (stride, _), _ = ir.MemRefType(counts_ref.type).get_strides_and_offset()
        lane, warp = simt.lane_and_warp()
        place = arith.addi(arith.muli(warp, const(stride)), lane)
        address = simt.gmem_address(counts_ref, arith.muli(place, const(4)))
        found = []
        for row, start in itertools.product(
            range(0, rows, words.WARPS), range(0, tiles, words.WARP)
        ):
            is_tile = simt.less(lane, const(tiles - start))
            is_there = arith.andi(is_tile, simt.less(warp, const(rows - row)))
            found.append(simt.load_word(address, 4 * (row * stride + start), is_there))
        return simt.int_array(found, words.layout(size))

    return step(counts_ref)


@load.in_jax
def _load(counts_ref):
    return counts_ref[...]


@primitive
def are_few(
    counts: jax.Array, tiles: int, of_warps_ref, *, most: int, most_of_a_token: int
) -> jax.Array:
    """Whether active gates are at most `most_of_a_token` for each token and `most` together.

    Args:
      counts: of `load`.
      tiles: their number.
      of_warps_ref: SMEM, 16 bytes, for sums of the four warps.
      most, most_of_a_token: the limits.

    Returns:
      A bool scalar, the same for all threads.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=SCALAR)
    arguments = words.layout(counts.size), plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=arguments, return_type=result)
    def step(_, counts, of_warps_ref):
        total, is_above = const(0), const(0)
        for of_row in itertools.batched(words.of_lane(counts), pl.cdiv(tiles, words.WARP)):
            for number in _sums_of_bytes(of_row):
                total = arith.addi(total, number)
                above = simt.less(const(most_of_a_token), number)
                is_above = arith.select(above, const(most + 1), is_above)
        total = _sum_of_warps(arith.maxui(total, is_above), of_warps_ref)
        few = simt.less(total, const(most + 1))
        return mgpu.FragmentedArray.splat(few, (), is_signed=False)

    return step(counts, of_warps_ref)


@are_few.in_jax
def _are_few(counts, tiles, of_warps_ref, *, most, most_of_a_token):
    del tiles, of_warps_ref
    numbers = jnp.sum(counts[..., None] >> 8 * jnp.arange(4) & 0xFF, axis=1)
    return (jnp.sum(numbers) <= most) & (jnp.max(numbers) <= most_of_a_token)


def _sums_of_bytes(of_lane):
    """The sums of the four bytes of words over all lanes, each below 2^16 in a lane."""
    every_other, low = const(0x00FF00FF), const(0xFFFF)
    for shift in (0, 8):
        halves = [arith.andi(arith.shrui(word, const(shift)), every_other) for word in of_lane]
        half = functools.reduce(arith.addi, halves)
        yield simt.warp_sum(arith.andi(half, low))
        yield simt.warp_sum(arith.shrui(half, const(16)))


def _sum_of_warps(value, of_warps_ref):
    """The sum of a value of each warp."""
    ptx, (lane, warp) = mgpu.utils.inline_ptx, simt.lane_and_warp()
    of_warps = simt.smem_address(of_warps_ref)
    mine = arith.addi(of_warps, arith.muli(warp, const(4)))
    is_first = simt.less(lane, const(1))
    ptx("@$2 st.shared.b32 [$0], $1;", mine, value, is_first, has_side_effects=True)
    mgpu.warpgroup_barrier()
    totals = ptx(
        "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
        of_warps,
        result_types=[const(0).type] * words.WARPS,
        has_side_effects=True,
    )
    return functools.reduce(arith.addi, totals)


def any_thread(value: ir.Value) -> ir.Value:
    """Whether a thread of the block has `value` (i1); all of them wait for each other."""
    found = mgpu.utils.inline_ptx(
        "{.reg .pred any; barrier.cta.red.or.aligned.pred any, 0, $1; selp.b32 $0, 1, 0, any;}",
        value,
        result_types=const(0).type,
        has_side_effects=True,
        convergent=True,
    )
    return lanes.nonzero(simt.warp_max(found))  # so that ptxas knows that it is uniform

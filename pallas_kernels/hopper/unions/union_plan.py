"""Decides which tokens leave the tile unions, and lists the work for the others.

One kernel counts tile by tile (`tile_stats`). In the other, each thread block goes through what was
counted for its tile and those before, decides, and knows where its part of every list begins.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.common import lists, params, register_rows, support, warpgroup
from pallas_kernels.hopper.unions import tile_stats
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, GROUP_NEURONS, TILE_TOKENS, Plan
from pallas_kernels.quantised import Tokens


class _Operands(NamedTuple):
    """What the kernel reads, and what it changes.

    Attributes:
      masks: uint32 `[2, R, H / 32]`.
      stats, bits: of `tile_stats`.
      x: `[M, D]`, or the `Tokens`.
      gate: `[R, H, 256]`, to be changed.
    """

    masks: Any
    stats: Any
    bits: Any
    x: Any
    gate: Any


def union_plan(
    x: jax.Array | Tokens,
    gate_ref: jax.Ref,
    masks: jax.Array,
    counts: jax.Array,
    *,
    max_items: int | None = None,
    max_heavy: int | None = None,
) -> tuple[Plan, jax.Array, HeavyRows, jax.Array]:
    """Decides for each row tile whether its outlying tokens stay in its union, and lists the work.

    They leave, to be computed densely, if that takes fewer operations. A token with pre-activations
    that are not finite always leaves: x is not finite then, and 0 * inf is NaN behind a gate of 0.
    From the first tile whose items do not fit, all tokens leave.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192; or `Tokens`.
      gate_ref: mutable `[R, H, 256]` in the dtype of x; gates of tokens that leave are set to zero
        in the neurons of the plan's unions.
      masks: uint32 `[2, R, H / 32]`, R = ceil(M / 256), H a multiple of 128 up to 65536.
      counts: uint8 `[H / 64, R * 256]`.
      max_items: length of the work list, at least 1; None for R * H / 128, which always suffices.
      max_heavy: how many tokens may leave to save operations; None for any number.

    Returns:
      plan: for the tokens that stay.
      nnz: int32 `[M]`, non-zeros of each token.
      heavy: the tokens that leave; rows `[M rounded up to a multiple of 8]`.
      needs: int32 `[2]`, of `tile_union.needs_of`.

    Raises:
      ValueError: if a shape, a dtype or `max_items` is not as above.
    """
    m, d = jax.tree.leaves(x)[0].shape  # that of values; scales come behind them
    tiles, h = pl.cdiv(m, TILE_TOKENS), 32 * masks.shape[-1]
    dtype, exact = gate_ref.dtype, x.exact if isinstance(x, Tokens) else x
    support.check_array("x", exact, (m, d), dtype)
    support.check_weight("a weight to go with x and masks", jax.ShapeDtypeStruct((h, d), dtype))
    support.check_array("gate_ref", gate_ref, (tiles, h, TILE_TOKENS), dtype)
    support.check_array("masks", masks, (2, tiles, h // 32), jnp.uint32)
    support.check_array("counts", counts, (h // GROUP_NEURONS, tiles * TILE_TOKENS), jnp.uint8)
    all_items = tiles * h // CHUNK_NEURONS
    max_items = all_items if max_items is None else max_items
    if not 1 <= max_items <= all_items:
        raise ValueError(f"max_items must be from 1 to {all_items}, got {max_items}")
    masks, counts, x = in_place.barrier((masks, counts, x))
    stats, bits, nnz = in_place.barrier(tile_stats.tile_stats(masks, counts, m))
    padded_m = pl.cdiv(m, 8) * 8
    limits = dict(m=m, h=h, max_items=max_items, max_heavy=max_heavy)
    kernel = plgpu.kernel(
        functools.partial(_kernel, limits),
        out_type=(
            Plan(
                neurons=_int32(tiles, h),
                sizes=_int32(tiles),
                items=_int32(max_items),
                item_count=_int32(1),
                firsts=_int32(tiles),
            ),
            HeavyRows(
                count=_int32(1),
                rows=_int32(padded_m),
                x=jax.tree.map(lambda a: jax.ShapeDtypeStruct((padded_m, a.shape[1]), a.dtype), x),
            ),
            _int32(2),
        ),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="union_plan",
        compiler_params=params.UNORDERED,
    )
    plan, heavy, needs = in_place.barrier(kernel(_Operands(masks, stats, bits, x, gate_ref)))
    return plan, nnz[:m], heavy, needs


def _int32(*shape: int) -> Any:
    """The type of an array, in the place of the array."""
    return jax.ShapeDtypeStruct(shape, jnp.int32)


def _kernel(limits, operands, plan, heavy, needs):
    tile = lax.axis_index("tile")
    words = operands.masks.shape[2]
    mine = tile_stats.decide(operands.stats, tile, **limits)
    union, neurons = operands.masks.at[mine.leave, tile], plan.neurons.at[tile]

    def append_words(i, length):
        return lists.append_bits(union, i * 32, neurons, length)

    lax.fori_loop(0, mine.fits * pl.cdiv(words, 32), append_words, jnp.int32(0))
    plan.sizes[tile] = mine.size
    plan.firsts[tile] = first = mine.items - mine.own_items

    @pl.loop(0, mine.own_items)
    def _(chunk):
        plan.items[first + chunk] = tile * (32 * words // CHUNK_NEURONS) + chunk

    def leave(token, place):
        row = tile * TILE_TOKENS + token
        heavy.rows[place] = row
        register_rows.copy_token(operands.x, row, heavy.x, place)
        lists.clear(operands.gate.at[tile], neurons, mine.size, token)
        return place + 1

    def leave_word(i, place):
        outlying, not_finite = operands.bits[tile, 0, i], operands.bits[tile, 1, i]
        some = jnp.where(mine.leave > 0, outlying, jnp.uint32(0)) | not_finite
        word = jnp.where(mine.fits > 0, some, _ones(limits["m"] - tile * TILE_TOKENS - i * 32))

        def leave_bit(bit, place):
            leaves = (word >> bit.astype(jnp.uint32)) & 1 != 0
            return lax.cond(leaves, lambda: leave(i * 32 + bit, place), lambda: place)

        leave_bits = functools.partial(lax.fori_loop, 0, 32, leave_bit)
        return lax.cond(word != 0, lambda: leave_bits(place), lambda: place)

    warpgroup.barrier()  # before other warps' part of the neurons is read
    lax.fori_loop(0, TILE_TOKENS // 32, leave_word, mine.heavy - mine.own_heavy)

    @pl.when(tile == lax.axis_size("tile") - 1)
    def _():
        plan.item_count[0], heavy.count[0] = mine.items, mine.heavy
        needs[0], needs[1] = mine.needed, mine.infinite


def _ones(n: jax.Array) -> jax.Array:
    """A word whose first n bits are set, all if n is 32 or more, and none if it is not above 0."""
    high = (32 - jnp.clip(n, 1, 32)).astype(jnp.uint32)
    return jnp.where(n > 0, jnp.uint32(0xFFFFFFFF) >> high, jnp.uint32(0))

"""Which tokens leave the tile unions, and the lists of what the rest computes.

XLA decides, from small arrays; a kernel writes the lists, which would take XLA many more steps.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper import operands
from pallas_kernels.hopper.device import gather, lists
from pallas_kernels.layouts.tile_union import (
    CHUNK,
    GROUP,
    THRESHOLD,
    TOKENS,
    Plan,
    to_bits,
    to_words,
)

_DENSE_COST = 1.5  # a token computed densely takes three matmuls, on a union two


def union_plan_reference(x, gate_ref, masks, counts, *, max_items=None):
    """Pure-JAX meaning of `union_plan`; all lists are in ascending order."""
    m, h = x.shape[0], 32 * masks.shape[2]
    max_items = len(gate_ref) * h // CHUNK if max_items is None else max_items
    union, sizes, heavy, nnz = _decide(masks, counts, m, max_items)
    heavy = to_bits(heavy)
    gate_ref[...] = jnp.where(heavy[:, None], 0, gate_ref[...])
    neurons = jax.vmap(lambda words: _places(to_bits(words)))(union)
    chunks = jnp.arange(h // CHUNK) < -(-sizes // CHUNK)[:, None]
    items = _places(chunks.reshape(-1))[:max_items]
    chunk_counts = jnp.sum(chunks, axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(chunk_counts)
    plan = Plan(neurons, sizes, items, ends[-1:], ends - chunk_counts)
    padded_m = pl.cdiv(m, 8) * 8
    rows = _places(heavy.reshape(-1)[:padded_m])
    x_rows = jnp.pad(x, ((0, padded_m - m), (0, 0)))[rows]
    return plan, nnz, (jnp.sum(heavy, dtype=jnp.int32)[None], rows, x_rows)


def union_plan(
    x: jax.Array,
    gate_ref: jax.Ref,
    masks: jax.Array,
    counts: jax.Array,
    *,
    max_items: int | None = None,
) -> tuple[Plan, jax.Array, tuple[jax.Array, jax.Array, jax.Array]]:
    """Decides for each row tile whether its outlying tokens stay in its union, and lists the work.

    They leave, to be computed densely, if that takes fewer operations. A token with pre-activations
    that are not finite always leaves: x is not finite then, and 0 * inf is NaN behind a gate of 0.
    So do all tokens from the tile on whose items are one too many.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      gate_ref: mutable `[R, H, 256]`; the gates of the tokens that leave are set to zero where they
        are specified.
      masks: uint32 `[2, R, H / 32]`, R = ceil(M / 256), H a multiple of 128 up to 65536.
      counts: uint8 `[H / 64, R * 256]`.
      max_items: length of the work list, at least 1; None for R * H / 128, which always suffices.

    Returns:
      plan: for the tokens that stay.
      nnz: int32 `[M]`, non-zeros of each token.
      heavy: the list of tokens that leave, in any order, as `dense_rows` takes it: int32 `[1]`,
        their number; int32 `[M rounded up to a multiple of 8]`, the rows, and `[..., D]`, their
        rows of x.

    Raises:
      ValueError: if a shape, a dtype or `max_items` is not one of these.
    """
    m, d = x.shape
    tiles, h = pl.cdiv(m, TOKENS), 32 * masks.shape[-1]
    operands.check_weight("a weight to go with x and masks", jax.ShapeDtypeStruct((h, d), x.dtype))
    operands.check_array("gate_ref", gate_ref, (tiles, h, TOKENS), x.dtype)
    operands.check_array("masks", masks, (2, tiles, h // 32), jnp.uint32)
    operands.check_array("counts", counts, (h // GROUP, tiles * TOKENS), jnp.uint8)
    all_items = tiles * h // CHUNK
    max_items = all_items if max_items is None else max_items
    if not 1 <= max_items <= all_items:
        raise ValueError(f"max_items must be from 1 to {all_items}, got {max_items}")
    union, sizes, heavy, nnz = _decide(masks, counts, m, max_items)
    padded_m = pl.cdiv(m, 8) * 8
    item_count, heavy_count = (in_place.mutable(jnp.zeros(1, jnp.int32)) for _ in range(2))
    kernel = plgpu.kernel(
        _kernel,
        out_type=(
            jax.ShapeDtypeStruct((tiles, h), jnp.int32),
            jax.ShapeDtypeStruct((max_items,), jnp.int32),
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((padded_m,), jnp.int32),
            jax.ShapeDtypeStruct((padded_m, d), x.dtype),
        ),
        scratch_types=dict(scratch=plgpu.SMEM((1,), jnp.int32)),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="union_plan",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    arrays = in_place.apart((union, sizes, heavy, x))
    neurons, items, firsts, rows, x_rows = in_place.apart(
        kernel(*arrays, gate_ref, item_count, heavy_count)
    )
    plan = Plan(neurons, sizes, items, in_place.contents(item_count), firsts)
    return plan, nnz, (in_place.contents(heavy_count), rows, x_rows)


def _kernel(
    union,
    sizes,
    heavy,
    x,
    gate,
    item_count,
    heavy_count,
    neurons,
    items,
    firsts,
    rows,
    x_rows,
    *,
    scratch,
):
    tile = lax.axis_index("tile")
    words = union.shape[1]

    def append_words(i, length):
        return lists.append_bits(union.at[tile], i * 32, neurons.at[tile], length)

    lax.fori_loop(0, pl.cdiv(words, 32), append_words, jnp.int32(0))

    chunks = pl.cdiv(sizes[tile], CHUNK)
    place = lists.append(item_count, chunks, scratch)
    firsts[tile] = place

    @pl.loop(0, chunks)
    def _(chunk):
        items[place + chunk] = tile * (32 * words // CHUNK) + chunk

    def leave(token):
        row = tile * TOKENS + token
        place = lists.append(heavy_count, jnp.int32(1), scratch)
        rows[place] = row
        gather.store_row(x_rows.at[place], gather.load_row(x.at[row], jnp.bool(True)))
        lists.clear(gate.at[tile], neurons.at[tile], sizes[tile], token)

    @pl.loop(0, TOKENS // 32)
    def _(i):
        word = heavy[tile, i]

        @pl.when(word != 0)
        def _():
            @pl.loop(0, 32)
            def _(bit):
                pl.when((word >> bit.astype(jnp.uint32)) & 1 != 0)(lambda: leave(i * 32 + bit))


def _decide(masks, counts, m, max_items):
    """The bits of the unions, their sizes, the bits of heavy tokens, and each token's nnz."""
    tiles, h = masks.shape[1], 32 * masks.shape[2]
    nnz = jnp.sum(counts & 127, axis=0, dtype=jnp.int32)
    most = jnp.max(counts, axis=0)
    is_token = jnp.arange(most.size) < m
    outlying = ((most > THRESHOLD) & is_token).reshape(tiles, TOKENS)
    not_finite = ((most > 127) & is_token).reshape(tiles, TOKENS)
    every_size, usual_size = jnp.sum(lax.population_count(masks), axis=-1, dtype=jnp.int32)
    saved = TOKENS * (every_size - usual_size)
    leave = saved > _DENSE_COST * h * jnp.sum(outlying & ~not_finite, axis=1)
    sizes = jnp.where(leave, usual_size, every_size)
    fits = (jnp.cumsum(-(-sizes // CHUNK)) <= max_items)[:, None]
    union = jnp.where(fits, jnp.where(leave[:, None], masks[1], masks[0]), 0)
    heavy = (outlying & leave[:, None]) | not_finite | (is_token.reshape(tiles, TOKENS) & ~fits)
    return union, jnp.where(fits[:, 0], sizes, 0), to_words(heavy), nnz[:m]


def _places(bits: jax.Array) -> jax.Array:
    """Places of the true elements, ascending, then 0; int32 in the shape of `bits: [n]`."""
    (places,) = jnp.nonzero(bits, size=bits.size, fill_value=0)
    return places.astype(jnp.int32)

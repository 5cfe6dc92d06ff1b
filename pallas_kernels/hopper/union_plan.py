"""Decides which tokens leave the tile unions, and lists the work for the others.

XLA decides, from small arrays; a kernel writes the lists, which would take XLA many more steps.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper import support
from pallas_kernels.hopper.device import gather, lists
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.quantised import Tokens
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, GROUP_NEURONS, TILE_TOKENS, Plan


def union_plan(
    x: jax.Array | Tokens,
    gate_ref: jax.Ref,
    masks: jax.Array,
    counts: jax.Array,
    *,
    max_items: int | None = None,
    max_heavy: int | None = None,
) -> tuple[Plan, jax.Array, HeavyRows]:
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

    Raises:
      ValueError: if a shape, a dtype or `max_items` is not as above.
    """
    parts = jax.tree.leaves(x)  # the first has all columns
    m, d = parts[0].shape
    tiles, h = pl.cdiv(m, TILE_TOKENS), 32 * masks.shape[-1]
    dtype, exact = gate_ref.dtype, x.exact if isinstance(x, Tokens) else x
    support.check_array("x", exact, (m, d), dtype)
    support.check_weight("a weight to go with x and masks", jax.ShapeDtypeStruct((h, d), dtype))
    support.check_array("gate_ref", gate_ref, (tiles, h, TILE_TOKENS), dtype)
    support.check_array("masks", masks, (2, tiles, h // 32), jnp.uint32)
    support.check_array("counts", counts, (h // GROUP_NEURONS, tiles * TILE_TOKENS), jnp.uint8)
    all_items = tiles * h // CHUNK_NEURONS
    if max_items is not None and not 1 <= max_items <= all_items:
        raise ValueError(f"max_items must be from 1 to {all_items}, got {max_items}")
    union, sizes, heavy, nnz = tile_union.decide(masks, counts, m, max_items, max_heavy)
    padded_m = pl.cdiv(m, 8) * 8
    item_count, heavy_count = (in_place.mutable(jnp.zeros(1, jnp.int32)) for _ in range(2))
    kernel = plgpu.kernel(
        _kernel,
        out_type=(
            jax.ShapeDtypeStruct((tiles, h), jnp.int32),
            jax.ShapeDtypeStruct((max_items or all_items,), jnp.int32),
            jax.ShapeDtypeStruct((tiles,), jnp.int32),
            jax.ShapeDtypeStruct((padded_m,), jnp.int32),
            [jax.ShapeDtypeStruct((padded_m, a.shape[1]), a.dtype) for a in parts],
        ),
        scratch_types=dict(scratch=plgpu.SMEM((1,), jnp.int32)),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="union_plan",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    arrays = in_place.barrier((union, sizes, heavy, parts))
    neurons, items, firsts, rows, x_rows = in_place.barrier(
        kernel(*arrays, gate_ref, item_count, heavy_count)
    )
    plan = Plan(neurons, sizes, items, in_place.contents(item_count), firsts)
    x_rows = jax.tree.unflatten(jax.tree.structure(x), x_rows)
    return plan, nnz, HeavyRows(in_place.contents(heavy_count), rows, x_rows)


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

    chunks = pl.cdiv(sizes[tile], CHUNK_NEURONS)
    place = lists.append(item_count, chunks, scratch)
    firsts[tile] = place

    @pl.loop(0, chunks)
    def _(chunk):
        items[place + chunk] = tile * (32 * words // CHUNK_NEURONS) + chunk

    def leave(token):
        row = tile * TILE_TOKENS + token
        place = lists.append(heavy_count, jnp.int32(1), scratch)
        rows[place] = row
        for part, part_rows in zip(x, x_rows, strict=True):
            if part.shape[1] == 1:  # a scale
                part_rows[place, 0] = part[row, 0]
            else:
                gather.copy_row(part.at[row], part_rows.at[place])
        lists.clear(gate.at[tile], neurons.at[tile], sizes[tile], token)

    @pl.loop(0, TILE_TOKENS // 32)
    def _(i):
        word = heavy[tile, i]

        @pl.when(word != 0)
        def _():
            @pl.loop(0, 32)
            def _(bit):
                pl.when((word >> bit.astype(jnp.uint32)) & 1 != 0)(lambda: leave(i * 32 + bit))

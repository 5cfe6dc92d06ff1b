"""Meaning of `union_plan`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, Plan
from pallas_kernels.quantised import Tokens
from pallas_kernels.reference.places import places


def union_plan(
    x: jax.Array | Tokens,
    gate_ref: jax.Ref,
    masks: jax.Array,
    counts: jax.Array,
    *,
    max_items: int | None = None,
    max_heavy: int | None = None,
) -> tuple[Plan, jax.Array, HeavyRows, jax.Array]:
    """Makes the plan, with all lists in ascending order."""
    m, h = len(jax.tree.leaves(x)[0]), 32 * masks.shape[2]
    max_items = len(gate_ref) * h // CHUNK_NEURONS if max_items is None else max_items
    union, sizes, heavy_bits, nnz = tile_union.decide(masks, counts, m, max_items, max_heavy)
    heavy = tile_union.to_bits(heavy_bits)
    gate_ref[...] = jnp.where(heavy[:, None], 0, gate_ref[...])
    neurons = jax.vmap(lambda words: places(tile_union.to_bits(words)))(union)
    chunks = jnp.arange(h // CHUNK_NEURONS) < -(-sizes // CHUNK_NEURONS)[:, None]
    items = places(chunks.reshape(-1))[:max_items]
    chunk_counts = jnp.sum(chunks, axis=1, dtype=jnp.int32)
    ends = jnp.cumsum(chunk_counts)
    plan = Plan(neurons, sizes, items, ends[-1:], ends - chunk_counts)
    padded_m = -(-m // 8) * 8
    rows = places(heavy.reshape(-1)[:padded_m])
    x_rows = jax.tree.map(lambda a: jnp.pad(a, ((0, padded_m - m), (0, 0)))[rows], x)
    heavy_rows = HeavyRows(jnp.sum(heavy, dtype=jnp.int32)[None], rows, x_rows)
    return plan, nnz, heavy_rows, tile_union.stats_of_tiles(masks, counts, m)

"""The meaning of the kernels for tile unions."""

import jax
import jax.numpy as jnp

from pallas_kernels import quantised
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS, Plan, first_row
from pallas_kernels.rectifiers import RELU
from pallas_kernels.reference.places import places
from pallas_kernels.weights import only_live


def gate_union(x, w_gate, rectifier=RELU, live=None, *, dtype=None):
    """`act(x @ w^T)` as (gate, masks, counts); all of gate is specified."""
    z = only_live(quantised.times(x, w_gate), live)
    return tile_union.pack(z, x.dtype if dtype is None else dtype, rectifier)


def union_plan(x, gate_ref, masks, counts, *, max_items=None, max_heavy=None):
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
    needs = tile_union.needs_of(tile_union.stats_of_tiles(masks, counts, m), h)
    return plan, nnz, heavy_rows, needs


def union_up(x, gate, w_up, plan, rectifier=RELU, *, with_gate=False):
    """For each item, one product of its row tile and its gathered weights."""
    tile, neurons, in_union = plan.item_neurons()
    gates = jnp.where(in_union[:, :, None], gate[tile, neurons], 0)
    value = gates.astype(jnp.float32)
    if w_up is not None:
        tokens = tile * TILE_TOKENS + jnp.arange(TILE_TOKENS)
        up = jax.vmap(quantised.times)(_rows(w_up, neurons), _rows(x, tokens))
        value *= rectifier.linear(up)
    hidden = value.astype(gate.dtype)
    if with_gate and w_up is not None:
        hidden = jnp.concatenate([gates, hidden], axis=1)
    return hidden, jnp.sum(jnp.abs(value), where=in_union[:, :, None])


def _rows(a, indices):
    """These rows of an array, or of the values and the scale of a `Quantised`; past it, zeros."""
    return jax.tree.map(lambda a: a.at[indices].get(mode="fill", fill_value=0), a)


def union_down(h, weights, plan, m, residual=None):
    """Sums over all H columns of `plan.neurons`, with zeros past each union's size."""
    column = jnp.arange(plan.neurons.shape[1])
    keep = (column < plan.sizes[:, None])[:, :, None]
    blocks = jnp.minimum(plan.firsts[:, None] + column // CHUNK_NEURONS, len(h) - 1)
    y = jnp.float32(0)
    for i, w in enumerate(weights):
        row = first_row(h, len(weights), i) + column % CHUNK_NEURONS
        part = jnp.where(keep, h[blocks, row], 0)
        rows = jnp.where(keep, w[plan.neurons], 0)
        y += jnp.einsum("rht,rhd->rtd", part, rows, preferred_element_type=jnp.float32)
    y = y.reshape(-1, y.shape[-1])[: -(-m // 8) * 8].astype(h.dtype)
    return y if residual is None else y.at[:m].add(residual)

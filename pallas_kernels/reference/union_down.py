"""Meaning of `union_down`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, Plan, first_row


def union_down(
    h: jax.Array,
    weights: tuple[jax.Array, ...],
    plan: Plan,
    m: int,
    residual: jax.Array | None = None,
) -> jax.Array:
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

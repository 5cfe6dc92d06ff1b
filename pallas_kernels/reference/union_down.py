"""Meaning of `union_down`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, Plan, first_row


def union_down(h: jax.Array, weights: tuple[jax.Array, ...], plan: Plan, m: int) -> jax.Array:
    """Sums over all H columns of `plan.neurons`, with zeros past each union's size."""
    column = jnp.arange(plan.neurons.shape[1])
    blocks = jnp.minimum(plan.firsts[:, None] + column // CHUNK_NEURONS, len(h) - 1)
    y = jnp.float32(0)
    for i, w in enumerate(weights):
        row = first_row(h, len(weights), i) + column % CHUNK_NEURONS
        y += products(h[blocks, row], w, plan)
    return rows_of_y(y, m).astype(h.dtype)


def products(values: jax.Array, w: jax.Array, plan: Plan) -> jax.Array:
    """`[R, 256, D]`: values `[R, H, 256]` of `plan.neurons` times their rows of `w: [H, D]`."""
    keep = (jnp.arange(len(w)) < plan.sizes[:, None])[:, :, None]
    values, rows = (jnp.where(keep, a, 0) for a in (values, w[plan.neurons]))
    return jnp.einsum("rht,rhd->rtd", values, rows, preferred_element_type=jnp.float32)


def rows_of_y(y: jax.Array, m: int) -> jax.Array:
    """`y: [R, 256, D]` as `[m rounded up to a multiple of 8, D]`."""
    return y.reshape(-1, y.shape[-1])[: -(-m // 8) * 8]

"""Meaning of `gates_down`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.tile_union import Plan
from pallas_kernels.reference.union_down import products, rows_of_y


def gates_down(
    gate: jax.Array, w_down: jax.Array, plan: Plan, m: int
) -> tuple[jax.Array, jax.Array]:
    """Takes the gates of each union; l1 is a sum for each row tile."""
    tile, column = jnp.arange(len(gate))[:, None], jnp.arange(len(w_down))
    gates = gate[tile, plan.neurons]
    y = rows_of_y(products(gates, w_down, plan), m).astype(gate.dtype)
    in_union = (column < plan.sizes[:, None])[:, :, None]
    return y, jnp.sum(jnp.abs(gates.astype(jnp.float32)), axis=(1, 2), where=in_union)

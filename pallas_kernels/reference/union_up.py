"""Meaning of `union_up`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.rectifiers import RELU, Rectifier
from pallas_kernels.layouts.tile_union import TILE_TOKENS, Plan


def union_up(
    x: jax.Array,
    gate: jax.Array,
    w_up: jax.Array | None,
    plan: Plan,
    rectifier: Rectifier = RELU,
    *,
    with_gate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """For each item, one product of its row tile and its gathered weights."""
    tiles = plan.neurons.shape[0]
    tile, neurons, in_union = plan.item_neurons()
    gates = jnp.where(in_union[:, :, None], gate[tile, neurons], 0)
    value = gates.astype(jnp.float32)
    if w_up is not None:
        x = jnp.pad(x, ((0, -x.shape[0] % TILE_TOKENS), (0, 0))).reshape(tiles, TILE_TOKENS, -1)
        up = jnp.einsum(
            "idt,ihd->iht", x[tile[:, 0]].mT, w_up[neurons], preferred_element_type=jnp.float32
        )
        value *= rectifier.linear(up)
    hidden = value.astype(gate.dtype)
    if with_gate and w_up is not None:
        hidden = jnp.concatenate([gates, hidden], axis=1)
    return hidden, jnp.sum(jnp.abs(value), where=in_union[:, :, None])

"""Meaning of `union_up`."""

import jax
import jax.numpy as jnp

from pallas_kernels import quantised
from pallas_kernels.layouts.tile_union import TILE_TOKENS, Plan
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier


def union_up(
    x: Operand,
    gate: jax.Array,
    w_up: Operand | None,
    plan: Plan,
    rectifier: Rectifier = RELU,
    *,
    with_gate: bool = False,
) -> tuple[jax.Array, jax.Array]:
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

"""Meaning of `hidden_grads`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, GROUP_NEURONS, TILE_TOKENS, Plan
from pallas_kernels.rectifiers import RELU, Rectifier


def hidden_grads(
    dy: jax.Array,
    w_down: jax.Array,
    h_ref: jax.Ref,
    l1_grad: jax.Array,
    plan: Plan,
    lists: NeuronLists,
    rectifier: Rectifier = RELU,
    extra: jax.Array | None = None,
) -> tuple[jax.Array, ...]:
    """Computes one product for each item, then scatters into the lists."""
    tiles = plan.neurons.shape[0]
    tile, neurons, in_union = plan.item_neurons()
    dy = jnp.pad(dy, ((0, -dy.shape[0] % TILE_TOKENS), (0, 0))).reshape(tiles, TILE_TOKENS, -1)
    dh = jnp.einsum(
        "idt,ihd->iht", dy[tile[:, 0]].mT, w_down[neurons], preferred_element_type=jnp.float32
    )
    hidden = h_ref[...].astype(jnp.float32)
    gate, value = hidden[:, :-CHUNK_NEURONS], hidden[:, -CHUNK_NEURONS:]
    gated = gate.shape[1] > 0
    dh += 0 if extra is None else extra
    grads = rectifier.gradients(dh, gate if gated else None, value, l1_grad[0])
    h_ref[...] = jnp.concatenate(grads, axis=1).astype(w_down.dtype)

    token = tile[:, :, None] * TILE_TOKENS + jnp.arange(TILE_TOKENS)
    every_slot = lists.slots(jnp.arange(tiles * TILE_TOKENS))
    slot = every_slot[neurons[:, :, None] // GROUP_NEURONS, token]
    is_used = in_union[:, :, None] & ((gate if gated else value) != 0)
    slot = jnp.where(is_used, slot, len(lists.tokens))
    zeros = jnp.zeros((len(lists.tokens), GROUP_NEURONS), w_down.dtype)
    place = slot, jnp.broadcast_to(neurons[:, :, None] % GROUP_NEURONS, slot.shape)
    return tuple(zeros.at[place].set(a.astype(zeros.dtype), mode="drop") for a in (value, *grads))

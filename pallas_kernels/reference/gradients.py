"""The meaning of the kernels for sparse gradients."""

import dataclasses

import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.neuron_lists import NeuronLists, slots_for
from pallas_kernels.layouts.tile_union import (
    CHUNK_NEURONS,
    GROUP_NEURONS,
    TILE_TOKENS,
    to_words,
)
from pallas_kernels.rectifiers import RELU


def neuron_lists(counts, m, capacity):
    """Lists the tokens by sums over the bits that say who uses a group."""
    token = jnp.arange(counts.shape[1], dtype=jnp.int32)
    bits = to_words((counts & 127 != 0) & (token < m))
    in_word = lax.population_count(bits).astype(jnp.int32)
    before_word = jnp.cumsum(in_word, axis=1) - in_word
    all_lengths = jnp.sum(in_word, axis=1)
    slots = slots_for(all_lengths)
    starts = jnp.cumsum(slots) - slots
    words = [lax.bitcast_convert_type(bits, jnp.int32), starts[:, None] + before_word]
    starts = jnp.minimum(starts, capacity)
    lists = NeuronLists(
        tokens=jnp.zeros(capacity, jnp.int32),
        starts=starts,
        lengths=jnp.minimum(all_lengths, capacity - starts),
        words=jnp.stack(words, axis=-1),
        order=jnp.argsort(-all_lengths).astype(jnp.int32),
    )
    tokens = lists.tokens.at[lists.slots(token)].set(token, mode="drop")
    return dataclasses.replace(lists, tokens=tokens), all_lengths


def hidden_grads(dy, w_down, h_ref, l1_grad, plan, lists, rectifier=RELU, extra=None, into=None):
    """Computes one product for each item, then scatters into the lists, if there are any."""
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
    into = h_ref if into is None else into
    into[...] = jnp.concatenate(grads, axis=1).astype(w_down.dtype)
    if lists is None:
        return ()

    token = tile[:, :, None] * TILE_TOKENS + jnp.arange(TILE_TOKENS)
    every_slot = lists.slots(jnp.arange(tiles * TILE_TOKENS))
    slot = every_slot[neurons[:, :, None] // GROUP_NEURONS, token]
    is_used = in_union[:, :, None] & ((gate if gated else value) != 0)
    slot = jnp.where(is_used, slot, len(lists.tokens))
    zeros = jnp.zeros((len(lists.tokens), GROUP_NEURONS), w_down.dtype)
    place = slot, jnp.broadcast_to(neurons[:, :, None] % GROUP_NEURONS, slot.shape)
    return tuple(zeros.at[place].set(a.astype(zeros.dtype), mode="drop") for a in (value, *grads))


def weight_grads(values, x, lists):
    """For each list, one product over all slots, with zeros in those of other lists."""
    slot = jnp.arange(len(lists.tokens))

    def block(start_and_length):
        start, length = start_and_length
        keep = ((slot >= start) & (slot < start + length))[:, None]
        rows = jnp.where(keep, x[lists.tokens], 0)
        return tuple(
            jnp.einsum("sn,sd->nd", jnp.where(keep, v, 0), rows, preferred_element_type=jnp.float32)
            for v in values
        )

    grads = lax.map(block, (lists.starts, lists.lengths))
    return tuple(grad.reshape(-1, x.shape[1]).astype(x.dtype) for grad in grads)

"""Meaning of `neuron_lists`."""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.neuron_lists import NeuronLists, slots_for
from pallas_kernels.layouts.tile_union import to_words


def neuron_lists(counts: jax.Array, m: int, capacity: int) -> tuple[NeuronLists, jax.Array]:
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

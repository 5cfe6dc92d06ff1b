"""Meaning of `weight_grads`."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.neuron_lists import NeuronLists


def weight_grads(
    entries: tuple[jax.Array, ...], x: jax.Array, dy: jax.Array, lists: NeuronLists
) -> tuple[jax.Array, ...]:
    """For each list, products over all slots, with zeros in those of other lists."""
    slot = jnp.arange(len(lists.tokens))

    def block(start_and_length):
        start, length = start_and_length
        keep = ((slot >= start) & (slot < start + length))[:, None]

        def product(entry, a):
            entry, rows = jnp.where(keep, entry, 0), jnp.where(keep, a[lists.tokens], 0)
            return jnp.einsum("sn,sd->nd", entry, rows, preferred_element_type=jnp.float32)

        h, *grads = entries
        return product(h, dy), *(product(grad, x) for grad in grads)

    sums = lax.map(block, (lists.starts, lists.lengths))
    return tuple(a.reshape(-1, x.shape[1]).astype(x.dtype) for a in sums)

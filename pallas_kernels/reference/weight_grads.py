"""Meaning of `weight_grads`."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.neuron_lists import NeuronLists


def weight_grads(
    values: tuple[jax.Array, ...], x: jax.Array, lists: NeuronLists
) -> tuple[jax.Array, ...]:
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

"""Meaning of `dense_block`."""

import jax
import jax.numpy as jnp

from pallas_kernels import quantised
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights


def dense_block(
    x: jax.Array, weights: Weights, rectifier: Rectifier = RELU
) -> tuple[jax.Array, jax.Array]:
    """y, and h with the sign of a zero where its gate is not."""
    dtype = x.dtype
    gate = rectifier.gate(quantised.times(x, weights.activated), dtype).astype(dtype)
    h = gate.astype(jnp.float32)
    if weights.linear is not None:
        h *= rectifier.linear(quantised.times(x, weights.linear))
    h = jnp.where((gate != 0) & (h.astype(dtype) == 0), -0.0, jnp.where(gate != 0, h, jnp.abs(h)))
    h = h.astype(dtype)
    y = jnp.dot(h, weights.down, preferred_element_type=jnp.float32)
    return y.astype(dtype), h

"""Meaning of `pallas_kernels.hopper.token_rows.add`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.weights import Weights


def add(
    gate: jax.Array,
    stream: Stream,
    weights: Weights,
    layer: jax.Array,
    scale: jax.Array,
    *,
    tokens: int,
    eps: float,
) -> Stream:
    """Computes all tokens, with dense products; rounds the sum once."""
    del tokens
    number = layer[0]
    h = gate.astype(jnp.float32)
    if weights.linear is not None:
        u = jnp.dot(stream.scaled, weights.linear[number].T, preferred_element_type=jnp.float32)
        h *= u * stream.inverse_rms(eps)
    y = jnp.dot(h, weights.down[number].astype(jnp.float32), precision="highest")
    y += stream.x.astype(jnp.float32)
    return Stream.of(y.astype(stream.x.dtype), scale[number])

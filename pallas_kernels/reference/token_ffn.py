"""Meaning of `pallas_kernels.hopper.decode.token_ffn.add`."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.reference import token_product
from pallas_kernels.weights import Weights


def add(
    gate: Gate,
    stream: Stream,
    weights: Weights,
    layer: jax.Array,
    counts: jax.Ref,
    scale: jax.Array,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    eps: float,
) -> Stream:
    """Computes up for all neurons, and ignores it where the gate is 0, but not where it is -0."""
    del counts, batch  # which concern speed alone
    h = values = gate.values
    if weights.linear is not None:
        up = token_product.project(
            stream, (weights.linear,), layer, k_axis=2, eps=eps, dtype=jnp.float32
        )
        h = values.astype(jnp.float32) * rectifier.linear(up)
        h = jnp.where((values != 0) | jnp.signbit(values), h, 0.0)
    return token_product.add_product(h.astype(values.dtype), weights.down, layer, stream.x, scale)

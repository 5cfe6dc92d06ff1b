"""Meaning of `pallas_kernels.hopper.decode.token_gate`."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.decode import active_counts
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.reference.token_product import of_live, product
from pallas_kernels.weights import Weights


def gate(
    x: jax.Array,
    weights: Weights,
    layer: jax.Array,
    counts: jax.Ref | None,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    norm: tuple[jax.Array, float] | None = None,
) -> Gate:
    """Padding is zero. No tile is computed further: that concerns speed alone."""
    x = jnp.pad(x, ((0, -len(x) % 8), (0, 0)))
    before = product(x, weights.activated, layer, 2)
    if norm is not None:
        squares, eps = norm
        before *= jax.lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    g = jnp.where(before == -jnp.inf, -0.0, rectifier.gate(before, x.dtype)).astype(x.dtype)
    g = of_live(jnp.where((jnp.arange(len(x)) < batch)[:, None], g, 0), weights.live, layer)
    opens = active_counts.packed(g)
    if counts is None:
        zeros = active_counts.zeros(1, *g.shape)
        return Gate(g, counts=zeros.at[0, 1:, active_counts.column(0) :].set(opens))
    counts[layer[0], 1:, active_counts.column(0) :] = opens
    return Gate(g)

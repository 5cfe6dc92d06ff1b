"""Meaning of `dense_rows`."""

import jax
import jax.numpy as jnp

from pallas_kernels import quantised
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights, only_live


def dense_rows(
    heavy: HeavyRows, weights: Weights, rectifier: Rectifier = RELU, keep: int = 0
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array | None]:
    """Computes all M rows of `heavy.x` densely, and uses those on the list."""
    m, dtype = heavy.rows.shape[0], weights.down.dtype
    is_listed = jnp.arange(m) < heavy.count[0]

    def product(w):
        return quantised.times(quantised.for_product(heavy.x, w), w)[:m]

    gate = rectifier.gate(product(weights.activated), dtype).astype(dtype)
    gate = only_live(gate, weights.live)
    h = gate.astype(jnp.float32)
    if weights.linear is not None:
        h = only_live(h * rectifier.linear(product(weights.linear)), weights.live)
    y = jnp.dot(h.astype(dtype), weights.down, preferred_element_type=jnp.float32)
    l1 = jnp.sum(jnp.sum(jnp.abs(h), axis=1), where=is_listed)
    fired = jnp.any((gate != 0) & is_listed[:, None], axis=0)
    if not keep:
        return y.astype(dtype), l1, fired, None
    kept = jnp.stack([h] if weights.linear is None else [gate.astype(jnp.float32), h]).astype(dtype)
    kept = jnp.pad(kept[:, :keep], ((0, 0), (0, max(keep - m, 0)), (0, 0)))
    return y.astype(dtype), l1, fired, kept

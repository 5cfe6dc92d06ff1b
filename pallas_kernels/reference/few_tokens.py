"""Meaning of `few_tokens_ffn`."""

import jax
import jax.numpy as jnp

from pallas_kernels.quantised import for_product, times, tokens
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights, only_live


def few_tokens_ffn(
    x: jax.Array, weights: Weights, rectifier: Rectifier = RELU
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """The dense block, but ignores weights of neurons that do not fire, even inf and NaN."""
    given = tokens(x, weights.inner)

    def product(w):
        return times(for_product(given, w), w)

    g = rectifier.gate(product(weights.activated), x.dtype).astype(x.dtype)
    g = only_live(g, weights.live)
    u = 1.0 if weights.linear is None else rectifier.linear(product(weights.linear))
    h = jnp.where(g != 0, g.astype(jnp.float32) * u, 0)
    fired = jnp.any(g != 0, axis=0)
    used = jnp.where(fired[:, None], weights.down, 0).astype(jnp.float32)
    y = jnp.dot(h, used, precision="highest")
    nnz = jnp.sum(g != 0, axis=1, dtype=jnp.int32)
    l1 = jnp.sum(jnp.abs(h), axis=1)
    if weights.linear is not None:  # 0 * inf: an up projection meets a gate of zero
        most = g.shape[1] if weights.live is None else weights.live
        is_nan = ~jnp.all(jnp.isfinite(x), axis=1) & (nnz < most)
        y, l1 = jnp.where(is_nan[:, None], jnp.nan, y), jnp.where(is_nan, jnp.nan, l1)
    return y.astype(x.dtype), nnz, l1, fired

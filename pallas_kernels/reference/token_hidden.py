"""Meaning of `pallas_kernels.hopper.token_hidden.hidden`."""

import jax
import jax.numpy as jnp


def hidden(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    layer: jax.Array,
    open_gates: jax.Ref,
    *,
    batch: int,
    norm: tuple[jax.Array, float] | None = None,
    prefetch: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Computes up for all neurons, and ignores it where gates are shut; padding is zero."""
    del prefetch  # which concerns speed alone
    scale = jnp.ones((), jnp.float32)
    if norm is not None:
        squares, eps = norm
        scale = jax.lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    before, *up = (
        scale
        * jnp.einsum(
            "md,hd->mh",
            x,
            w[layer[0]],
            preferred_element_type=jnp.float32,
            precision="highest",
        )
        for w in weights
    )
    is_token = (jnp.arange(len(x)) < batch)[:, None]
    gate = jnp.where(is_token, jnp.maximum(before, 0.0), 0.0).astype(x.dtype)
    h = gate.astype(jnp.float32)
    if up:
        h = jnp.where(gate != 0, h * up[0], 0.0)
        h = jnp.where(is_token & (before == -jnp.inf), jnp.nan, h)  # 0 * inf
    counts = jnp.sum(gate != 0, axis=1, dtype=jnp.int32)
    open_gates[layer[0]] = open_gates[layer[0]] + counts
    return gate, h.astype(x.dtype)

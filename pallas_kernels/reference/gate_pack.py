"""Meaning of `gate_pack`: the dense gate, then TwELL."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import twell


def gate_pack(x: jax.Array, w: jax.Array) -> jax.Array:
    """`relu(x @ w^T)` in TwELL, entries in ascending order."""
    g = jnp.einsum("md,hd->mh", x, w, preferred_element_type=jnp.float32)
    return twell.pack(jnp.maximum(g, 0).astype(x.dtype))

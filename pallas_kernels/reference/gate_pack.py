"""Meaning of `gate_pack`: the dense gate, then TwELL."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import twell
from pallas_kernels.layouts.rectifiers import RELU, Rectifier


def gate_pack(x: jax.Array, w: jax.Array, rectifier: Rectifier = RELU) -> jax.Array:
    """`act(x @ w^T)` in TwELL, entries in ascending order."""
    z = jnp.einsum("md,hd->mh", x, w, preferred_element_type=jnp.float32)
    return twell.pack(rectifier.gate(z, x.dtype).astype(x.dtype))

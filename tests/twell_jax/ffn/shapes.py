"""Operands of `sparse_ffn` of which only shapes and dtypes are known."""

import jax
import jax.numpy as jnp


def shapes(m, d=2048, h=256, dtype=jnp.bfloat16, gated=True):
    """x, w_gate, w_up and w_down, for m tokens."""
    x, w = (jax.ShapeDtypeStruct((n, d), dtype) for n in (m, h))
    return x, w if gated else None, w, w

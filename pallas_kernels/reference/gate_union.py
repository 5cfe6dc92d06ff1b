"""Meaning of `gate_union`: the dense product, then tile unions."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.rectifiers import RELU, Rectifier
from pallas_kernels.layouts.weights import only_live


def gate_union(
    x: jax.Array, w: jax.Array, rectifier: Rectifier = RELU, live: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`act(x @ w^T)` as (gate, masks, counts); all of gate is specified."""
    z = jnp.einsum("md,hd->mh", x, w, preferred_element_type=jnp.float32)
    return tile_union.pack(only_live(z, live), x.dtype, rectifier)

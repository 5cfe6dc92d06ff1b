"""Activations of a word a lane: what `Rectifier` says of arrays, by what lanes have."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.decode.one_launch import lane
from pallas_kernels.hopper.decode.one_launch.products import LOG2_E
from pallas_kernels.rectifiers import Rectifier


def rounded(z: jax.Array, dtype=jnp.bfloat16) -> jax.Array:
    """Float32 as `dtype`, of 16 bits, has them."""
    return lane.unpack(lane.pack(z, z, dtype), dtype)[0]


def is_active(z: jax.Array, rectifier: Rectifier, dtype=jnp.bfloat16) -> jax.Array:
    """`Rectifier.is_active`; NaN is."""
    compared = rounded(z, dtype) if rectifier.threshold else z
    return ~(compared <= rectifier.threshold)


def activated(z: jax.Array, rectifier: Rectifier | None, dtype=jnp.bfloat16) -> jax.Array:
    """`Rectifier.gate`, float32; SiLU if there is none."""
    if rectifier is None:
        return z / (1 + lane.exp2(z * -LOG2_E))
    z = jnp.where(is_active(z, rectifier, dtype), z, 0.0)
    if not rectifier.squared:
        return z
    root = rounded(z, dtype)
    return root * root


def linear(u: jax.Array, rectifier: Rectifier | None) -> jax.Array:
    """`Rectifier.linear`."""
    is_rectified = rectifier is not None and rectifier.both
    return jnp.where(u <= 0, 0.0, u) if is_rectified else u

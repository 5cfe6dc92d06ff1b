"""Activations of a word a lane: what `Rectifier` says of arrays, by what lanes have."""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.decode.one_launch import lane
from pallas_kernels.hopper.decode.one_launch.products import LOG2_E
from pallas_kernels.rectifiers import Rectifier


def rounded(z: jax.Array) -> jax.Array:
    """Float32 as bfloat16 has them."""
    return lane.unpack(lane.pack(z, z))[0]


def is_active(z: jax.Array, rectifier: Rectifier) -> jax.Array:
    """`Rectifier.is_active`; NaN is."""
    compared = rounded(z) if rectifier.threshold else z
    return ~(compared <= rectifier.threshold)


def activated(z: jax.Array, rectifier: Rectifier | None) -> jax.Array:
    """`Rectifier.gate`, float32; SiLU if there is none."""
    if rectifier is None:
        return z / (1 + lane.exp2(z * -LOG2_E))
    z = jnp.where(is_active(z, rectifier), z, 0.0)
    if not rectifier.squared:
        return z
    root = rounded(z)
    return root * root


def linear(u: jax.Array, rectifier: Rectifier | None) -> jax.Array:
    """`Rectifier.linear`."""
    is_rectified = rectifier is not None and rectifier.both
    return jnp.where(u <= 0, 0.0, u) if is_rectified else u

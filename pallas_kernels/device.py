"""The device that a program is made for."""

import jax
from jax.sharding import AbstractDevice


def current() -> jax.Device | AbstractDevice:
    """The one that is run on or, where the mesh that is set has none, lowered for."""
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:
        return device
    device = jax.config.jax_default_device or jax.devices()[0]
    return jax.devices(device)[0] if isinstance(device, str) else device

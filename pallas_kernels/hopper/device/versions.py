"""What differs for the kernels between JAX 0.11.2 and 0.12: the only place that knows versions."""

import jax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

_HAS_STORE = hasattr(plgpu, "store")  # from 0.12 on


def store(ref, value: jax.Array) -> None:
    """`ref[...] = value`, also where no order of the lanes avoids bank conflicts or short sectors.

    From 0.12 on, a plain assignment of a tiled array to a reference that is not tiled is an error
    there.
    """
    if _HAS_STORE:
        plgpu.store(ref, value, optimized=False)
    else:
        ref[...] = value


def first_block() -> int | jax.Array:
    """Index 0 in the index map of a block that may reach past the array, where TMA reads zeros.

    From 0.12 on, a literal 0 is an error there; an index that is computed is not.
    """
    return jnp.int32(0) if _HAS_STORE else 0

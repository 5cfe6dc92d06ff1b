"""Arrays that kernels change in place, and the barriers that this needs.

XLA may hand a kernel a slice of a larger array, or have it write a result into one; it does so in
loops over layers (dynamic-slice fusion). It then forgets which operands and results of the kernel
share their memory, and what the kernel changed in place is lost. XLA looks for slices only up to an
optimization barrier. So all operands and results of such a kernel pass one; constants need none.
"""

from typing import Any

import jax
from jax import lax


def barrier(arrays: Any) -> Any:
    """A tree of arrays that XLA takes neither for slices of others nor for parts of others."""
    return lax.optimization_barrier(arrays)


def mutable(array: jax.Array) -> jax.Ref:
    """A reference to the contents of `array`, for kernels to change."""
    return jax.new_ref(barrier(array))


def contents(ref: jax.Ref) -> jax.Array:
    """What the reference holds after the kernels so far."""
    return barrier(ref[...])

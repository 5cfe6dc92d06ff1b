"""Arrays that kernels change in place.

XLA may give a kernel a slice of a larger array to read, or to write a result to, above all in loops
over layers (dynamic-slice fusion). It forgets then that others of its operands and results are to
be the same arrays, and what the kernel changes in place is lost. It looks for slices only up to a
barrier, which all operands and results of such a kernel have to pass, but for constants.
"""

from typing import Any

import jax
from jax import lax


def apart(arrays: Any) -> Any:
    """A tree of arrays, for XLA neither slices of others nor parts that others are made of."""
    return lax.optimization_barrier(arrays)


def mutable(array: jax.Array) -> jax.Ref:
    """A reference to the contents of `array`, for kernels to change."""
    return jax.new_ref(apart(array))


def contents(ref: jax.Ref) -> jax.Array:
    """What the kernels so far made of it."""
    return apart(ref[...])

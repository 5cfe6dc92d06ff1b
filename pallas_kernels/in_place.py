"""Arrays that kernels change in place, and the barriers that they need.

XLA may hand a kernel a slice of a larger array, or let it write its result into one; it does so in
loops over layers (dynamic-slice fusion). It then forgets which operands and results of the kernel
share memory, and what the kernel changed in place is lost. XLA looks for slices only up to an
optimization barrier, so all operands and results of such a kernel pass through one; constants need
none (docs/design/0014-in-place-behind-a-barrier.md).

`used_after` keeps what XLA computes out of the way of kernels that overlap.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax


def barrier(arrays: Any) -> Any:
    """The pytree `arrays` behind an optimization barrier: XLA fuses no slices across it."""
    return lax.optimization_barrier(arrays)


def mutable(array: jax.Array) -> jax.Ref:
    """A reference to the contents of `array`, for kernels to change."""
    return jax.new_ref(barrier(array))


def contents(ref: jax.Ref) -> jax.Array:
    """The contents of `ref` after the kernels called so far."""
    return barrier(ref[...])


def used_after(last: jax.Array, array: jax.Array) -> jax.Array:
    """`array`, but what XLA makes of it waits for `last`, a number that is never negative.

    XLA would put sums of one kernel's results between two kernels, which then could not overlap. It
    does not know that a result of the last kernel, such as a sum of magnitudes, is not negative.
    """
    return jnp.where(last < 0, 0, array)

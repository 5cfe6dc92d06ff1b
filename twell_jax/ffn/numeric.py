"""What counts as a number and as an integer, wherever a caller gives one, and how types mix."""

import math
from numbers import Integral, Real
from typing import Any

import jax
import numpy as np

_INT32 = np.iinfo(np.int32)


def is_number(value: Any) -> bool:
    """Whether it is a finite real number, also one of NumPy; True and False are none."""
    if not isinstance(value, Real) or isinstance(value, bool):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # an integer that is no float
        return False


def is_integer(value: Any) -> bool:
    """Whether it is an integer, also one of NumPy; True and False are none."""
    return isinstance(value, Integral) and not isinstance(value, bool)


def are_int32(values: Any) -> bool:
    """Whether an array or a number has integers that stay the same as int32, in which devices
    compute: on the host by its values, on the device, where they are not read, by its dtype."""
    if isinstance(values, jax.Array | jax.ShapeDtypeStruct):
        return np.issubdtype(values.dtype, np.integer) and np.can_cast(values.dtype, np.int32)
    values = np.asarray(values)
    if not np.issubdtype(values.dtype, np.integer):
        return False
    return not values.size or (values.min() >= _INT32.min and values.max() <= _INT32.max)


# For functions, as JAX traces gradients when the call is over: a stricter rule is for the caller's
# own code. In a `with` that is inside another it would stay.
STANDARD = jax.numpy_dtype_promotion("standard")

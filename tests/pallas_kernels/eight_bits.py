"""What 8-bit operands of kernels stand for."""

import numpy as np

from pallas_kernels.layouts.quantised import Quantised


def in_float64(a):
    """An array, or the numbers that a `Quantised` stands for."""
    if isinstance(a, Quantised):
        return in_float64(a.values) * in_float64(a.scale)
    return np.asarray(a, np.float64)


def lost(d: int) -> float:
    """How much sums of d products may lose in the tensor cores, as a share of their typical size.

    These keep 13 bits after the leading one of the largest operand of an addition, which a sum of
    about sqrt(d) products is.
    """
    return 2.0**-13 * d**0.5

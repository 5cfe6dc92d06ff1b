"""What 8-bit operands of kernels stand for."""

import numpy as np

from pallas_kernels.layouts.quantised import Quantised


def in_float64(a):
    """An array, or the numbers that a `Quantised` stands for."""
    if isinstance(a, Quantised):
        return in_float64(a.values) * in_float64(a.scale)
    return np.asarray(a, np.float64)

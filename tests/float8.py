"""Numbers as 8-bit floats with a scale, by NumPy."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(a, dtype):
    """The numbers that an array becomes, float64."""
    a = np.asarray(a, np.float64)
    _, exponent = np.frexp(np.abs(a).max() / float(ml_dtypes.finfo(dtype).max))
    return (a / 2.0**exponent).astype(np.float32).astype(dtype).astype(np.float64) * 2.0**exponent

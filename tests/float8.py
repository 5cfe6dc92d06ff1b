"""Numbers as 8-bit floats with a scale, by NumPy."""

import ml_dtypes
import numpy as np

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(a, dtype, most=None):
    """The numbers that an array becomes, float64, if no element is said to exceed `most`."""
    a = np.asarray(a, np.float64)
    most = np.abs(a).max() if most is None else float(most)
    _, exponent = np.frexp(most / float(ml_dtypes.finfo(dtype).max))
    return (a / 2.0**exponent).astype(np.float32).astype(dtype).astype(np.float64) * 2.0**exponent

"""Errors as the norm of the difference over the norm of the reference, and what rounding allows."""

import numpy as np

# The most by which rounding to bfloat16 changes a number, relative to it; float16 changes it less.
ROUNDING = 2.0**-8


def relative_error(out, ref) -> float:
    """Of two arrays of one shape: zero if both are zero, huge if only the reference is."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    assert out.shape == ref.shape
    return np.linalg.norm(out - ref) / max(np.linalg.norm(ref), np.finfo(float).tiny)

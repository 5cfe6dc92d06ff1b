"""Errors as the norm of the difference over the norm of the reference, and what rounding allows."""

import ml_dtypes
import numpy as np

# The most by which rounding to bfloat16 changes a number, relative to it; float16 changes it less.
ROUNDING = 2.0**-8


def relative_error(out, ref) -> float:
    """Of two arrays of one shape: zero if both are zero, huge if only the reference is."""
    out, ref = np.asarray(out, np.float64), np.asarray(ref, np.float64)
    assert out.shape == ref.shape
    return np.linalg.norm(out - ref) / max(np.linalg.norm(ref), np.finfo(float).tiny)


def in_e4m3(a, axis):
    """`a` in float64, rounded to e4m3 with scales along an axis."""
    a = np.asarray(a, np.float64)
    largest = np.abs(a).max(axis, keepdims=True)
    scale = np.where(largest > 0, largest / 448, 1)
    return (a / scale).astype(np.float32).astype(ml_dtypes.float8_e4m3fn).astype(float) * scale

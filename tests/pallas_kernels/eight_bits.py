"""8-bit operands of kernels, and what they stand for."""

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantised import E4M3, Quantised
from tests import seeds


def shapes(rows: int, d: int) -> Quantised:
    """The shapes of a `Quantised` with a scale for each row."""
    scale = jax.ShapeDtypeStruct((rows, 1), jnp.float32)
    return Quantised(jax.ShapeDtypeStruct((rows, d), E4M3), scale)


def scaled(*values: jax.Array) -> list[Quantised]:
    """Matrices of e4m3 with scales that lose no bits."""
    rng = seeds.rng()
    scales = (2.0 ** rng.integers(-9, 9, (len(a), 1)).astype(np.float32) for a in values)
    return [Quantised(a, jnp.asarray(scale)) for a, scale in zip(values, scales, strict=True)]


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

"""Meaning of `round_tokens`."""

import jax

from pallas_kernels import quantised
from pallas_kernels.quantised import Quantised


def round_tokens(x: jax.Array) -> Quantised:
    """x in 8 bits, a scale for each token."""
    return quantised.rounded(x)

"""Meaning of `gate_pack`: the dense gate, then TwELL."""

import jax

from pallas_kernels import quantised
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier


def gate_pack(
    x: Operand,
    w: Operand,
    rectifier: Rectifier = RELU,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """`act(x @ w^T)` in TwELL, entries in ascending order."""
    dtype = x.dtype if dtype is None else dtype
    return twell.pack(rectifier.gate(quantised.times(x, w), dtype).astype(dtype))

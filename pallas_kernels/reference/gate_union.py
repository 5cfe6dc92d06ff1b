"""Meaning of `gate_union`: the dense product, then tile unions."""

import jax

from pallas_kernels import quantised
from pallas_kernels.layouts import tile_union
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import only_live


def gate_union(
    x: Operand,
    w: Operand,
    rectifier: Rectifier = RELU,
    live: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`act(x @ w^T)` as (gate, masks, counts); all of gate is specified."""
    z = only_live(quantised.times(x, w), live)
    return tile_union.pack(z, x.dtype if dtype is None else dtype, rectifier)

"""Scales of quantised operands, which the sums of their products are multiplied with."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu


def padded(factors: jax.Array, block: int) -> jax.Array:
    """`factors`, continued by zeros to a multiple of `block`."""
    return jnp.pad(factors, (0, -factors.size % block))


def multiplied(acc: jax.Array, of_rows, of_columns, row: jax.Array, column: jax.Array):
    """`acc: [rows, columns]`, in the WGMMA layout, times the factors of its columns, then its rows.

    Args:
      acc: float32, in the WGMMA layout.
      of_rows, of_columns: GMEM, float32, factors for all rows and columns of the product.
      row, column: the place of `acc` in the product.
    """
    for axis, ref, first in ((1, of_columns, column), (0, of_rows, row)):
        part = ref.at[pl.ds(first, acc.shape[axis])]
        layout = plgpu.Layout.WGMMA.reduce(1 - axis)
        factors = plgpu.load(part, layout=layout, optimized=False)
        acc *= lax.broadcast_in_dim(factors, acc.shape, (axis,))
    return acc

"""Products with operands of 8-bit floats, for training: the forward and both gradients.

Operands of the forward are e4m3 and gradients e5m2 (arXiv 2209.05433, section 3). An array has one
scale, a power of two that follows from its largest element whenever it is used, so there is no
state. Scales of powers of two round nothing, and dividing by them rounds only what is smallest.

XLA leaves these products to cuBLASLt's FP8 where a GPU has it: a product of matrices that are
converted and multiplied by a scalar each is what its GemmRewriter looks for. Anywhere else it
multiplies the rounded operands in the dtype of x.
"""

from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

KEPT = "float8 operands"  # for policies of `jax.checkpoint`: what the gradients of weights read

_FORWARD, _BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


class Scaled(NamedTuple):
    """An array `values * scale`: 8-bit floats, and float32 `[]`, a power of two."""

    values: jax.Array
    scale: jax.Array


def scaled(a: jax.Array, dtype: jax.typing.DTypeLike) -> Scaled:
    """`a` in 8 bits; its largest finite element lies in the upper half of the range of `dtype`."""
    finite = jnp.where(jnp.isfinite(a), jnp.abs(a), 0)
    largest = jnp.max(finite).astype(jnp.float32) / float(jnp.finfo(dtype).max)
    _, exponent = jnp.frexp(largest)
    exponent = jnp.clip(exponent, -126, 126)  # both 2^exponent and its inverse are normal numbers
    one = jnp.float32(1)
    divided = a.astype(jnp.float32) * jnp.ldexp(one, -exponent)
    return Scaled(divided.astype(dtype), jnp.ldexp(one, exponent))


def products(x: jax.Array, kernels: Sequence[jax.Array]) -> list[jax.Array]:
    """`[x @ kernel for kernel in kernels]` with operands of 8 bits, as are those of the gradients.

    Several kernels are multiplied as one, and share a scale. What is not finite in x makes NaN of
    its own rows of the results, and of no others.

    Args:
      x: `[..., K]`, usually tokens; bfloat16 or float32.
      kernels: each `[K, N]` in the dtype of x.

    Returns:
      `[..., N]` in the dtype of x for each kernel.
    """
    stops = list(accumulate(kernel.shape[1] for kernel in kernels))
    rows = x.reshape(-1, x.shape[-1])
    parts = jnp.split(_product(rows, jnp.concatenate(kernels, axis=1)), stops[:-1], axis=1)
    return [part.reshape(*x.shape[:-1], -1) for part in parts]


@jax.custom_vjp
def _product(x: jax.Array, kernel: jax.Array) -> jax.Array:
    return _with_residuals(x, kernel)[0]


def _with_residuals(x: jax.Array, kernel: jax.Array) -> tuple[jax.Array, tuple[Scaled, Scaled]]:
    rows, matrix = scaled(x, _FORWARD), scaled(kernel, _FORWARD)
    # As bytes: `jax.checkpoint` rounds floats that it keeps, and makes NaN of e4m3 above 240.
    kept = checkpoint_name(lax.bitcast_convert_type(rows.values, jnp.uint8), KEPT)
    rows = Scaled(lax.bitcast_convert_type(kept, _FORWARD), checkpoint_name(rows.scale, KEPT))
    return _dot(rows, matrix, (1, 0), x.dtype), (rows, matrix)


def _gradients(kept: tuple[Scaled, Scaled], of_y: jax.Array) -> tuple[jax.Array, jax.Array]:
    (rows, matrix), grads = kept, scaled(of_y, _BACKWARD)
    return _dot(grads, matrix, (1, 1), of_y.dtype), _dot(rows, grads, (0, 0), of_y.dtype)


_product.defvjp(_with_residuals, _gradients)


def _dot(a: Scaled, b: Scaled, axes: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """The product over an axis of each, rounded once to `dtype`."""
    left, right = (m.values.astype(dtype) * m.scale.astype(dtype) for m in (a, b))
    dimensions = (axes[:1], axes[1:]), ((), ())
    return lax.dot_general(left, right, dimensions, preferred_element_type=dtype)

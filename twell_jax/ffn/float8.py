"""Products with operands of 8-bit floats, for training: the forward and both gradients.

Operands of the forward are e4m3 and gradients e5m2 (arXiv 2209.05433, section 3). An array has one
scale, a power of two that follows from its largest element whenever it is used, so there is no
state. Scales of powers of two round nothing, and dividing by them rounds only what is smallest.

XLA leaves these products to cuBLASLt's FP8 where a GPU has it: a product of matrices that are
converted and multiplied by a scalar each is what its GemmRewriter looks for. Anywhere else it
multiplies the rounded operands in the dtype of x.
"""

from collections.abc import Sequence
from functools import partial, reduce
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name

KEPT = "float8 operands"  # for policies of `jax.checkpoint`: what the gradients of weights read

FORWARD, BACKWARD = jnp.float8_e4m3fn, jnp.float8_e5m2


class Scaled(NamedTuple):
    """An array `values * scale`: 8-bit floats, and float32 `[]`, a power of two."""

    values: jax.Array
    scale: jax.Array


def scaled(
    parts: Sequence[jax.Array],
    dtype: jax.typing.DTypeLike,
    *,
    joined: int = 1,
    reduced: int = 0,
    most: jax.Array | None = None,
) -> Scaled:
    """Matrices side by side along the axis `joined`, in 8 bits.

    Their largest finite element lies in the upper half of the range of `dtype`. Its maxima along
    the axis `reduced` come first: XLA takes them as it computes a part, along with sums over that
    axis. With `most`, float32 [], which no element exceeds, this one lies there, and XLA rounds
    where it computes. Floats lose nothing by a scale that is too large, down to 2^-14 of `most`.
    """
    if most is None:
        pairs = [(a, largest(a, reduced)) for a in parts]
        if len(parts) == 1:
            # XLA would compute it twice, as it cannot round what has no scale yet. To write several
            # takes longer: gradients of rotated queries and keys, or of gate and up.
            pairs = lax.optimization_barrier(pairs)
        parts = [a for a, _ in pairs]
        most = reduce(jnp.maximum, (jnp.max(maxima) for _, maxima in pairs)).astype(jnp.float32)
    scale, inverse = scale_and_inverse(most, dtype)
    rounded = [(a.astype(jnp.float32) * inverse).astype(dtype) for a in parts]
    return Scaled(jnp.concatenate(rounded, axis=joined), scale)


def scale_and_inverse(most: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array]:
    """The scale of an array of `dtype` without larger elements than `most`, and what it is
    multiplied with; float32 `[]` each."""
    _, exponent = jnp.frexp(most / float(jnp.finfo(dtype).max))
    exponent = jnp.clip(exponent, -126, 126)  # both 2^exponent and its inverse are normal numbers
    one = jnp.float32(1)
    return jnp.ldexp(one, exponent), jnp.ldexp(one, -exponent)


def largest(a: jax.Array, axis: int | None = None) -> jax.Array:
    """The largest finite magnitudes of `a` along an axis, or of all."""
    return jnp.max(jnp.where(jnp.isfinite(a), jnp.abs(a), 0), axis=axis)


# Float32 [] each: no finite element of x, and no weight, exceeds them.
type Most = tuple[jax.Array, jax.Array]


def products(
    x: jax.Array, weights: Sequence[jax.Array], axis: int = 0, most: Most | None = None
) -> list[jax.Array]:
    """x times each of the weights, with operands of 8 bits, as are those of the gradients.

    Several weights share a scale. What is not finite in x makes NaN of its own rows of the results,
    and of no others.

    Args:
      x: `[..., K]`, usually tokens; bfloat16 or float32.
      weights: each `[K, N]` in the dtype of x, or `[N, K]` where `axis` is 1.
      axis: the one that is summed over.
      most: of x and of the weights; None: they are looked for.

    Returns:
      `[..., N]` in the dtype of x for each of the weights.
    """
    ys = _products(x.reshape(-1, x.shape[-1]), tuple(weights), most, axis)
    return [y.reshape(*x.shape[:-1], -1) for y in ys]


@partial(jax.custom_vjp, nondiff_argnums=(3,))
def _products(
    x: jax.Array, weights: tuple[jax.Array, ...], most: Most | None, axis: int
) -> list[jax.Array]:
    return with_residuals(x, weights, most, axis)[0]


def with_residuals(
    x: jax.Array, weights: tuple[jax.Array, ...], most: Most | None, axis: int
) -> tuple[list[jax.Array], tuple[Scaled, Scaled]]:
    """`products` of `x: [M, K]`, and its operands, for the gradients."""
    of_x, of_weights = most or (None, None)
    rows = kept(scaled([x], FORWARD, most=of_x))
    ys, matrix = multiplied(rows, weights, of_weights, axis)
    return ys, (rows, matrix)


def multiplied(
    rows: Scaled, weights: tuple[jax.Array, ...], most: jax.Array | None, axis: int
) -> tuple[list[jax.Array], Scaled]:
    """The products of rounded tokens with weights that are not, and the rounded weights."""
    matrix = kept(scaled(weights, FORWARD, joined=1 - axis, reduced=1, most=most))
    matrices = split(matrix.values, [w.shape[1 - axis] for w in weights], 1 - axis)
    values = rows.values
    ys: list[jax.Array] = []
    for w, m in zip(weights, matrices, strict=True):
        # Else XLA merges small products, and leaves the merged one in the dtype of x.
        values, ys = lax.optimization_barrier((values, ys))
        factors = Scaled(values, rows.scale), Scaled(m, matrix.scale)
        ys.append(dot(*factors, (1, axis), w.dtype))
    return ys, matrix


def kept(a: Scaled) -> Scaled:
    """The same, by a name for policies of `jax.checkpoint`."""
    # As bytes: it rounds floats that it keeps, and makes NaN of e4m3 above 240.
    values = checkpoint_name(lax.bitcast_convert_type(a.values, jnp.uint8), KEPT)
    return Scaled(lax.bitcast_convert_type(values, a.values.dtype), checkpoint_name(a.scale, KEPT))


def _gradients(
    axis: int, operands: tuple[Scaled, Scaled], of_ys: list[jax.Array]
) -> tuple[jax.Array, tuple[jax.Array, ...], None]:
    (rows, matrix), grads = operands, scaled(of_ys, BACKWARD)
    dtype, widths = of_ys[0].dtype, [of_y.shape[1] for of_y in of_ys]
    factors = (rows, grads) if axis == 0 else (grads, rows)
    of_weights = split(dot(*factors, (0, 0), dtype), widths, 1 - axis)
    return dot(grads, matrix, (1, 1 - axis), dtype), tuple(of_weights), None


_products.defvjp(with_residuals, _gradients)


def split(a: jax.Array, widths: Sequence[int], axis: int) -> list[jax.Array]:
    """The inverse of `jnp.concatenate`."""
    return jnp.split(a, list(accumulate(widths))[:-1], axis)


def dot(a: Scaled, b: Scaled, axes: tuple[int, int], dtype: jnp.dtype) -> jax.Array:
    """The product of matrices over an axis of each, rounded once to `dtype`."""
    left, right = (m.values.astype(dtype) * m.scale.astype(dtype) for m in (a, b))
    dimensions = (axes[:1], axes[1:]), ((), ())
    return lax.dot_general(left, right, dimensions, preferred_element_type=dtype)

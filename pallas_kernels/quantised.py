"""Matrices of 8-bit floats, and what a product with one means.

A float8_e4m3fn holds 0, and from 2^-9 to 448 numbers with four significant bits, fewer below 2^-6.
So a matrix is stored as such values and float32 scales (Micikevicius et al., arXiv 2209.05433).
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike

E4M3 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(E4M3).max)
TINY = float(jnp.finfo(jnp.float32).tiny)  # what is smaller may be taken for 0


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Quantised:
    """A weight of 8-bit floats, `values * scale`, as `quantise` makes it.

    Attributes:
      values: float8_e4m3fn `[..., H, D]`.
      scale: float32 `[..., H, 1]`, one for each row, or `[..., 1, D]`, one for each column.
    """

    values: jax.Array
    scale: jax.Array

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the values."""
        return self.values.shape

    @property
    def ndim(self) -> int:
        """That of the values."""
        return self.values.ndim

    @property
    def dtype(self) -> jnp.dtype:
        """That of the values."""
        return self.values.dtype

    def __len__(self) -> int:
        return len(self.values)


type Operand = jax.Array | Quantised
# Stored keys or values, `[L, B, S, kv_heads, head_dim]`; if they are quantised, `Quantised` holds
# references, and scales `[L, B, kv_heads, S]`.
type Cache = jax.Ref | Quantised


def values_of(operand: Any) -> Any:
    """The values of what is quantised, or what is not."""
    return operand.values if isinstance(operand, Quantised) else operand


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Tokens:
    """x as the products with several weights take it, some of them `Quantised`.

    Attributes:
      exact: `[M, D]`; None if all weights are `Quantised`.
      rounded: x in 8 bits, a scale for each token.
    """

    exact: jax.Array | None
    rounded: Quantised


type Scales = tuple[jax.Array, jax.Array]


def quantise(weight: ArrayLike, axis: int = -1) -> Quantised:
    """Rounds a weight to 8-bit floats.

    A scale is the largest magnitude of its row over 448, at least the smallest normal float32; that
    of a row of zeros is 1. Quotients are rounded to the nearest value, halves to even. So a number
    loses at most 1/16 of itself, or 2^-10 of its scale if that is more.

    Args:
      weight: floats `[..., H, D]`.
      axis: the axis that numbers with one scale lie along: -1 for rows, as for `w_gate` and `w_up`;
        -2 for columns, as for `w_down`. A product sums over this axis.

    Raises:
      ValueError: it is no matrix of floats, or holds an inf or a NaN. Under `jit`, which cannot
        raise, their rows become NaN.

    Example:
      >>> w = quantise(jnp.array([[1.0, -0.5], [0.0, 0.0]]))
      >>> w.values.tolist(), (448 * w.scale).tolist()
      ([[448.0, -224.0], [0.0, 0.0]], [[1.0], [448.0]])
    """
    weight = jnp.asarray(weight)
    if weight.ndim < 2 or not jnp.issubdtype(weight.dtype, jnp.floating) or axis not in (-1, -2):
        raise ValueError(
            f"a weight [..., H, D] of floats and axis -1 or -2 are needed, got {weight.dtype} "
            f"{list(weight.shape)} and axis {axis}"
        )
    if not isinstance(weight, jax.core.Tracer) and not jnp.all(jnp.isfinite(weight)):
        count = int(jnp.sum(~jnp.isfinite(weight)))
        raise ValueError(f"the weight has {count} elements that are inf or NaN; repair them first")
    return rounded(weight, axis)


def rounded(a: jax.Array, axis: int = -1) -> Quantised:
    """`quantise` without its checks, for `a: [..., D]`: rows with an inf or a NaN become NaN.

    On GPUs XLA's reciprocals may be two units in the last place off. A number at the middle of two
    values may then become the other one.
    """
    largest = jnp.max(jnp.abs(a), axis=axis, keepdims=True).astype(jnp.float32)
    # Products with reciprocals are cheap, and XLA rewrites quotients.
    scale = jnp.where(largest > 0, jnp.maximum(largest * (1 / LARGEST), TINY), 1.0)
    scale = jnp.where(jnp.isfinite(largest), scale, jnp.nan)
    values = (a.astype(jnp.float32) * (1 / scale)).astype(E4M3)
    # With its "excess precision", XLA may leave out this conversion and one back.
    return Quantised(lax.optimization_barrier(values), scale)


def tokens(
    x: jax.Array,
    weights: Iterable[Operand],
    round_tokens: Callable[[jax.Array], Quantised] = rounded,
) -> jax.Array | Tokens:
    """`x: [M, D]` as products with these weights take it, rounded once for all `Quantised` ones."""
    are_quantised = [isinstance(w, Quantised) for w in weights]
    if not any(are_quantised):
        return x
    return Tokens(None if all(are_quantised) else x, round_tokens(x))


def for_product(x: jax.Array | Tokens, w: Operand) -> Operand:
    """What of `tokens(x, ...)` a product with one of these weights takes."""
    if not isinstance(x, Tokens):
        return x
    if isinstance(w, Quantised):
        return x.rounded
    assert x.exact is not None
    return x.exact


def unscaled[W: jax.Array | None](
    x: Operand, w: W | Quantised
) -> tuple[jax.Array, jax.Array | W, Scales | None]:
    """What a kernel multiplies for `times`: two arrays, and the scales of the rows of each.

    The scales are float32 `[M]` and `[H]`; None if neither is `Quantised`.
    """
    if isinstance(x, Quantised) and isinstance(w, Quantised):
        return x.values, w.values, (x.scale[:, 0], w.scale[:, 0])
    assert not isinstance(x, Quantised) and not isinstance(w, Quantised)
    return x, w, None


def times(x: Operand, w: Operand) -> jax.Array:
    """`x w^T` in float32 for `x: [M, D]` and `w: [H, D]`; both are `Quantised`, or neither."""
    if isinstance(x, Quantised) and isinstance(w, Quantised):
        return _scaled_sums(x, w, -1)
    return jnp.einsum("md,hd->mh", x, w, preferred_element_type=jnp.float32)


@partial(jax.custom_jvp, nondiff_argnums=(2,))
def product(x: jax.Array, w: Quantised, axis: int) -> jax.Array:
    """x times a quantised matrix, with x quantised, too: a scale for each of its rows.

    Products of the values are exact and summed in float32; scales multiply the sums. The result is
    rounded once. (cuBLASLt's fast accumulation, which keeps fewer bits, is not used.)

    Args:
      x: `[..., K]`, usually tokens.
      w: `[H, D]`, quantised along `axis`, which has K elements.
      axis: -1 or -2, the axis of w to sum over.

    Returns:
      `[..., N]` in the dtype of x; N is the size of the other axis of w.

    Raises:
      ValueError: it is differentiated.
    """
    return _scaled_sums(rounded(x), w, axis).astype(x.dtype)


def _scaled_sums(x, w, axis):
    sums = lax.dot_general(
        x.values,
        w.values,
        (((x.ndim - 1,), (axis % 2,)), ((), ())),
        precision=lax.Precision.HIGHEST,
        preferred_element_type=jnp.float32,
    )
    return sums * x.scale * jnp.squeeze(w.scale, axis)


@product.defjvp
def _refuse(axis, primals, tangents):
    raise ValueError(
        "a product with Quantised weights has no gradients; train arrays, and quantise them then"
    )

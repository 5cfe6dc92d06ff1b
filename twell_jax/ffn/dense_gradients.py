"""The gradients of a block by dense products of XLA, which round where those of `xla.ffn` do."""

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.rectifiers import Rectifier
from pallas_kernels.layouts.weights import Weights, only_live

_PARTS = 8  # `of_operands` takes this part of the tokens at a time


def of_operands(
    act: Rectifier, x: jax.Array, weights: Weights, dy: jax.Array, l1_grad: jax.Array
) -> tuple[jax.Array, Weights]:
    """The gradients for x and the weights from the operands alone, in parts to save memory.

    Args: as of `unions.backward`.
    """
    m, d = x.shape
    operands = [jnp.pad(a, ((0, -m % _PARTS), (0, 0))).reshape(_PARTS, -1, d) for a in (x, dy)]
    sums = [jnp.zeros(w.shape, jnp.float32) for w in (*weights.inner, weights.down)]
    dx = jnp.zeros_like(operands[0])
    # A loop would keep XLA from choosing this way without the host (docs/design/0011).
    for i in range(_PARTS):
        operands, sums, dx = lax.optimization_barrier((operands, sums, dx))
        x, dy = (a[i] for a in operands)
        h, grads = hidden(act, x, weights, dy, l1_grad)
        for n, factors in enumerate([*((grad, x) for grad in grads), (h, dy)]):
            # Without a barrier XLA may hold products of all weights at a time.
            (a, b), sums = lax.optimization_barrier((factors, sums))
            sums[n] += product(a.T, b)
        dx = dx.at[i].set(for_x(grads, weights))
    *inner, down = (a.astype(x.dtype) for a in sums)
    return dx.reshape(-1, d)[:m], Weights.of(inner, down)


def hidden(
    act: Rectifier, x: jax.Array, weights: Weights, dy: jax.Array, l1_grad: jax.Array
) -> tuple[jax.Array, list[jax.Array]]:
    """h and the gradients for the products with `Weights.inner`, `[tokens, H]` each.

    Args: as of `unions.backward`, for any of the tokens.
    """
    # Without barriers XLA may leave out a product's rounding, and a gate next to the threshold
    # would not open as it did in the forward. It may also copy all weights into one.
    products: list[jax.Array] = []
    for w in weights.inner:
        x, products = lax.optimization_barrier((x, [*products, jnp.dot(x, w.T)]))
    z, *up = (a.astype(jnp.float32) for a in products)
    gate = act.gate(z, x.dtype).astype(x.dtype)
    kept = [only_live(a, weights.live) for a in (gate, *(gate * act.linear(u) for u in up))]
    grads = for_inner(act, kept, jnp.dot(dy, weights.down.T), l1_grad)
    return kept[-1].astype(x.dtype), grads


def for_inner(
    act: Rectifier, kept: Sequence[jax.Array], dh: jax.Array, l1_grad: jax.Array
) -> list[jax.Array]:
    """The gradients for the products with `Weights.inner`; all arrays are of one shape.

    Args:
      act: the activation.
      kept: g and h, or h alone in the non-gated form.
      dh: the gradient for h, without the part from the L1 term.
      l1_grad: float32 [], the gradient for the sum of |h|.
    """
    *gate, h = (a.astype(jnp.float32) for a in kept)
    grads = act.gradients(dh.astype(jnp.float32), gate[0] if gate else None, h, l1_grad)
    return [grad.astype(dh.dtype) for grad in grads]


def for_x(grads: Sequence[jax.Array], weights: Weights) -> jax.Array:
    """The gradient for x, `[tokens, D]`, of those from `for_inner`, `[tokens, H]` each."""
    products = (jnp.dot(grad, w) for grad, w in zip(grads, weights.inner, strict=True))
    return functools.reduce(jnp.add, products)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a b`, summed and returned in float32, so that a sum of products is rounded once."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)

"""The gradients of a block by dense products of XLA, which round where those of `xla.ffn` do.

But the gradient for h stays in float32 until penalties are added: rounded, one near 1 would take up
none of a penalty below 2^-9.
"""

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import quantised
from pallas_kernels.quantised import Quantised
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights, only_live
from twell_jax.ffn.union_lasso import Slopes, TokenWindows, sums_of_tokens

_TOKEN_PARTS = 8  # taken one at a time, to save memory


def with_gate_in_8_bits(weights: Weights) -> Weights:
    """The weights with the projection that decides which neurons are active `Quantised`.

    The kernels of unions then round x for its product, too. It needs D a multiple of 128: other
    weights stay as they are.
    """
    if weights.down.shape[1] % 128:
        return weights
    rounded: Any = quantised.rounded(weights.activated)
    return replace(weights, **{"up" if weights.gate is None else "gate": rounded})


def of_operands(
    act: Rectifier,
    in_8_bits: bool,
    x: jax.Array,
    weights: Weights,
    dy: jax.Array,
    l1_grad: jax.Array,
    slopes: Slopes | None,
) -> tuple[jax.Array, Weights]:
    """The gradients for x and the weights from the operands alone, in parts to save memory.

    Args: as of `unions.backward`.
    """
    m, d = x.shape
    of_forward = with_gate_in_8_bits(weights) if in_8_bits else weights
    operands = [_in_parts(a) for a in (x, dy)]
    sums = [jnp.zeros(w.shape, jnp.float32) for w in (*weights.inner, weights.down)]
    dx = jnp.zeros_like(operands[0])
    # A loop would keep XLA from choosing this way without the host (docs/design/0009).
    for i in range(_TOKEN_PARTS):
        operands, sums, dx = lax.optimization_barrier((operands, sums, dx))
        x, dy = (a[i] for a in operands)
        kept = hidden(act, x, of_forward)
        tokens = i * len(x) + jnp.arange(len(x))
        extra = None if slopes is None else slopes.of_tokens(kept[-1], tokens)
        grads = for_inner(act, kept, product(dy, weights.down.T), l1_grad, extra)
        h = kept[-1].astype(x.dtype)
        for n, factors in enumerate([*((grad, x) for grad in grads), (h, dy)]):
            # Without a barrier XLA may hold products of all weights at a time.
            (a, b), sums = lax.optimization_barrier((factors, sums))
            sums[n] += product(a.T, b)
        dx = dx.at[i].set(for_x(grads, weights))
    *inner, down = (a.astype(x.dtype) for a in sums)
    return dx.reshape(-1, d)[:m], Weights.of(inner, down)


def window_sums(act: Rectifier, x: jax.Array, weights: Weights, windows: TokenWindows) -> jax.Array:
    """The sums of squares of h over windows, float32 `[W, H]`, from the operands alone."""
    parts, count = _in_parts(x), len(windows.sizes)
    padding = -len(x) % _TOKEN_PARTS
    window = jnp.pad(windows.of_token, (0, padding), constant_values=count).reshape(
        _TOKEN_PARTS, -1
    )
    sums = jnp.zeros((count, len(weights.down)), jnp.float32)
    for i in range(_TOKEN_PARTS):
        parts, sums = lax.optimization_barrier((parts, sums))
        h = hidden(act, parts[i], weights)[-1].astype(x.dtype)
        sums += sums_of_tokens(h, window[i], count)
    return sums


def _in_parts(a: jax.Array) -> jax.Array:
    """`[M, D]` as `[_TOKEN_PARTS, M / _TOKEN_PARTS, D]`, with zeros at the end."""
    return jnp.pad(a, ((0, -len(a) % _TOKEN_PARTS), (0, 0))).reshape(_TOKEN_PARTS, -1, a.shape[1])


def hidden(act: Rectifier, x: jax.Array, weights: Weights) -> list[jax.Array]:
    """g, rounded, and h, not rounded, `[tokens, H]`; h alone, rounded, in the non-gated form.

    Args: as of `unions.backward`, for any of the tokens; weights may be `Quantised`.
    """
    # Without barriers XLA may leave out a product's rounding, and a gate next to the threshold
    # would not be active as in the forward. It may also copy all weights into one.
    products: list[jax.Array] = []
    for w in weights.inner:
        z = quantised.product(x, w, -1) if isinstance(w, Quantised) else jnp.dot(x, w.T)
        x, products = lax.optimization_barrier((x, [*products, z]))
    z, *up = (a.astype(jnp.float32) for a in products)
    gate = act.gate(z, x.dtype).astype(x.dtype)
    return [only_live(a, weights.live) for a in (gate, *(gate * act.linear(u) for u in up))]


def for_inner(
    act: Rectifier,
    kept: Sequence[jax.Array],
    dh: jax.Array,
    l1_grad: jax.Array,
    extra: jax.Array | None = None,
) -> list[jax.Array]:
    """The gradients for the products with `Weights.inner`; all arrays are of one shape.

    Args:
      act: the activation.
      kept: g and h, or h alone in the non-gated form; the first in the dtype of the results.
      dh: the gradient for h, without what penalties add; in float32, as a penalty that is small
        beside it would be lost if both were rounded.
      l1_grad: float32 [], the gradient for the sum of |h|.
      extra: what the gradient for h has besides.
    """
    *gate, h = (a.astype(jnp.float32) for a in kept)
    total = dh + (0 if extra is None else extra)
    grads = act.gradients(total, gate[0] if gate else None, h, l1_grad)
    return [grad.astype(kept[0].dtype) for grad in grads]


def for_x(grads: Sequence[jax.Array], weights: Weights) -> jax.Array:
    """The gradient for x, `[tokens, D]`, of those from `for_inner`, `[tokens, H]` each."""
    products = (jnp.dot(grad, w) for grad, w in zip(grads, weights.inner, strict=True))
    return functools.reduce(jnp.add, products)


def product(a: jax.Array, b: jax.Array) -> jax.Array:
    """`a b`, summed and returned in float32, so that a sum of products is rounded once."""
    return jnp.dot(a, b, preferred_element_type=jnp.float32)

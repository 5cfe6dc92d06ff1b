"""The whole feed-forward block for few tokens (decoding); its cost is reading the weights.

Two kernels: `token_gate` reads w_gate once, `token_ffn` the rows of w_up and w_down behind active
gates; if many gates are active, both multiply densely instead, as their numbers decide on the
device.
The second is launched while the first still runs (docs/design/0008-decoding.md).
"""

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels import in_place
from pallas_kernels.hopper.common import support
from pallas_kernels.hopper.decode import active_counts, token_ffn, token_gate
from pallas_kernels.layouts.stream import MAX_TOKENS
from pallas_kernels.quantised import Quantised
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights

_TILE = 8  # tokens; a copy of more than one tile needs whole ones


def few_tokens_ffn(
    x: jax.Array, weights: Weights, rectifier: Rectifier = RELU
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `y = (act(x @ w_gate^T) * (x @ w_up^T)) @ w_down` for at most 64 tokens.

    The non-gated form is `y = act(x @ w_up^T) @ w_down`. Gate and hidden activation are rounded to
    the dtype of x, sums are float32 and have a fixed order. Behind a gate of zero, no row of w_up
    or w_down is used (in the non-gated form, of w_down), unless many gates are active. Where x is
    not finite, the gated result is NaN as in the dense computation, where a gate of zero then meets
    inf or NaN.

    Args:
      x: `[M, D]`, bfloat16 or float16, M from 1 to 64, D a multiple of 64 from 128 to 8192.
      weights: `[H, D]` each, in the dtype of x, H a multiple of 128 up to 65536. Gate and up may be
        `Quantised`, D a multiple of 128; x is then rounded to 8-bit floats for them.
      rectifier: act, which may pass `x @ w_up^T` through a ReLU.

    Returns:
      y: `[M, D]`.
      nnz: int32 `[M]`, the number of non-zeros of the gate.
      l1: float32 `[M]`, the sum of the magnitudes of the hidden activation.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any token.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    check(x, weights)
    m, d = x.shape
    if m > _TILE:
        x = jnp.pad(x, ((0, -m % _TILE), (0, 0)))
    live = weights.live  # also that of a stack of one layer
    weights = jax.tree.map(lambda w: w[None], replace(weights, live=None))
    only = jnp.zeros(1, jnp.int32)
    gate = token_gate.gate(x, replace(weights, live=live), only, None, rectifier, batch=m)
    assert gate.counts is not None
    counts = in_place.mutable(gate.counts)
    y, l1 = token_ffn.multiply(gate, x, weights, counts, rectifier, batch=m)
    nnz = active_counts.of_tokens(in_place.contents(counts))[0, :m]
    l1 = gate.values.astype(jnp.float32) if l1 is None else l1
    return y[:, :d], nnz, jnp.sum(l1[:m], axis=1), jnp.any(gate.values[:m] != 0, axis=0)


def check(x: jax.Array, weights: Weights) -> None:
    """Raises ValueError unless kernels for few tokens take the operands."""
    support.check_weight("w_down", weights.down)
    h, d = weights.down.shape
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must be [M, D] with M from 1 to {MAX_TOKENS}, got {list(x.shape)}")
    support.check_array("x", x, (len(x), d), weights.down.dtype)
    support.check_array("live", weights.live, (1,), jnp.int32)
    for name, weight in (("w_gate", weights.gate), ("w_up", weights.up)):
        if isinstance(weight, Quantised):
            support.check_quantised(name, weight, (h, d))
        else:
            support.check_array(name, weight, (h, d), weights.down.dtype)

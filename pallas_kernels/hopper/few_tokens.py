"""The whole feed-forward block for few tokens (decoding); its cost is reading the weights.

Two kernels: `token_hidden` reads w_gate once and the rows of w_up behind open gates, `token_down`
the rows of w_down behind them. If many gates are open, both multiply densely instead, as their
numbers decide on the device. The second kernel is launched while the first still runs
(docs/design/0008-few-tokens.md).
"""

import jax
import jax.numpy as jnp

from pallas_kernels import in_place
from pallas_kernels.hopper import support, token_down, token_hidden
from pallas_kernels.layouts.weights import Weights

MAX_TOKENS = 64
_ROWS = 8  # the kernels take a multiple of so many tokens


def few_tokens_ffn(
    x: jax.Array, weights: Weights
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `y = (relu(x @ w_gate^T) * (x @ w_up^T)) @ w_down` for at most 64 tokens.

    The non-gated form is `y = relu(x @ w_up^T) @ w_down`. Gate and hidden activation are rounded to
    the dtype of x, sums are float32 and have a fixed order. Behind a gate of zero, no row of w_up
    or w_down is used (in the non-gated form, of w_down), unless many gates are open. Where x is not
    finite, the gated result is NaN as in the dense computation, where a gate of zero then meets inf
    or NaN.

    Args:
      x: `[M, D]`, bfloat16 or float16, M from 1 to 64, D a multiple of 64 from 128 to 8192.
      weights: `[H, D]` each, in the dtype of x, H a multiple of 128 up to 65536.

    Returns:
      y: `[M, D]`.
      nnz: int32 `[M]`, the number of non-zeros of the gate.
      l1: float32 `[M]`, the sum of the magnitudes of the hidden activation.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any token.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_up", weights.up)
    h, d = weights.up.shape
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must be [M, D] with M from 1 to {MAX_TOKENS}, got {list(x.shape)}")
    m = x.shape[0]
    support.check_array("x", x, (m, d), weights.up.dtype)
    support.check_array("w_gate", weights.gate, (h, d), weights.up.dtype)
    support.check_array("w_down", weights.down, (h, d), weights.up.dtype)

    x = jnp.pad(x, ((0, -m % _ROWS), (0, 0)))
    inner, w_down = tuple(w[None] for w in weights.inner), weights.down[None]
    only, open_gates = jnp.zeros(1, jnp.int32), in_place.mutable(jnp.zeros((1, len(x)), jnp.int32))
    gate, hidden = token_hidden.hidden(x, inner, only, open_gates, batch=m, prefetch=w_down)
    y = token_down.down(hidden, w_down, only, in_place.contents(open_gates), batch=m)
    gate, hidden = gate[:m], hidden[:m].astype(jnp.float32)
    nnz = jnp.sum(gate != 0, axis=1, dtype=jnp.int32)
    return y[:m, :d], nnz, jnp.sum(jnp.abs(hidden), axis=1), jnp.any(gate != 0, axis=0)

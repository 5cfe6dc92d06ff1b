"""The whole feed-forward block for few tokens, on GPUs without clusters.

Two kernels: `rows.hidden` reads w_gate once, and the rows of w_up whose gates are open for a token,
`columns.down` those of w_down. If all are open, they read all.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import reference
from pallas_kernels.ampere import columns, rows
from pallas_kernels.hopper.decode.few_tokens import check
from pallas_kernels.quantised import Quantised
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights


def few_tokens_ffn(
    x: jax.Array, weights: Weights, rectifier: Rectifier = RELU
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """As `hopper.few_tokens_ffn`; XLA computes a block with `Quantised` weights."""
    check(x, weights)
    if any(isinstance(w, Quantised) for w in weights.inner):
        return reference.few_tokens_ffn(x, weights, rectifier)
    m = len(x)
    gates, hidden, masks = rows.hidden(x, weights, rectifier)
    y = columns.down(hidden, masks, weights.down, m)
    gates, hidden = gates[:, :m], hidden[:, :m]
    nnz = jnp.sum(gates != 0, axis=0, dtype=jnp.int32)
    l1 = jnp.sum(jnp.abs(hidden.astype(jnp.float32)), axis=0)
    return y, nnz, l1, jnp.any(gates != 0, axis=1)

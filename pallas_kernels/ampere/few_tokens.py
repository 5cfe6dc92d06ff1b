"""The whole feed-forward block for few tokens, on GPUs without clusters.

Three kernels, each of which waits for the one before: `rows.gate` reads w_gate once, `rows.hidden`
and `columns.down` the rows of w_up and w_down whose gates are open for a token; if all are, all.
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
    gates, masks = rows.gate(x, weights.activated, weights.live, rectifier)
    hidden = gates
    if weights.linear is not None:
        hidden = rows.hidden(x, weights.linear, gates, masks, rectifier)
    y = columns.down(hidden, masks, weights.down, m)
    gates, hidden = gates[:, :m], hidden[:, :m]
    nnz = jnp.sum(gates != 0, axis=0, dtype=jnp.int32)
    l1 = jnp.sum(jnp.abs(hidden.astype(jnp.float32)), axis=0)
    return y, nnz, l1, jnp.any(gates != 0, axis=1)

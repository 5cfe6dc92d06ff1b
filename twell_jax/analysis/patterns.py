"""Draws tokens and gates that give a wanted pattern of active neurons.

The last feature of x is 1 and its gate weight is the neuron's threshold, so that the product with
the gates itself produces the pattern.
"""

from typing import Literal

import jax
import jax.numpy as jnp
from jax.scipy.stats import norm
from jax.typing import DTypeLike

DEAD = 0.3

type Pattern = Literal["uniform", "skewed"]


def independent(
    key: jax.Array,
    pattern: Pattern,
    m: int,
    d: int,
    h: int,
    nnz: float,
    dtype: DTypeLike,
    *,
    dead: float = DEAD,
) -> tuple[jax.Array, jax.Array]:
    """x `[m, d]` and w_gate `[h, d]` whose neurons are active independently, `nnz` per token.

    "uniform": every neuron is active with probability nnz / h. "skewed": a fraction `dead` never
    is, the others are with log-normal(0, 1.5) frequencies, at most 0.9.
    """
    key_x, key_w, key_p, key_dead = jax.random.split(key, 4)
    if pattern == "uniform":
        p = jnp.full(h, nnz / h)
    else:
        p = jnp.exp(1.5 * jax.random.normal(key_p, (h,)))
        p = jnp.where(jax.random.permutation(key_dead, h) < dead * h, 0.0, p)
        for _ in range(20):  # clipping lowers the sum, so scale again
            p = jnp.minimum(p * (nnz / p.sum()), 0.9)
    x = jax.random.normal(key_x, (m, d)).at[:, -1].set(1.0)
    w = jax.random.normal(key_w, (h, d)) / d**0.5
    # sum_i w_i x_i over the other features is close to standard normal for every neuron
    threshold = jnp.where(p > 0, norm.ppf(jnp.maximum(p, 1e-9)), -30.0)
    return x.astype(dtype), w.at[:, -1].set(threshold).astype(dtype)


def with_heavy_rows(x: jax.Array, every: int, thresholds: float = -1.0) -> jax.Array:
    """Makes nearly all neurons active for every `every`-th token, like a sequence's first one.

    `thresholds` is what its gates' thresholds are multiplied by; if it is 0, half of them are
    active.
    """
    return x.at[::every, -1].set(thresholds)

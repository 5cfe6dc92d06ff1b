"""Draws inputs and gate weights that give a desired pattern of non-zero activations.

The last feature of x is 1 and its gate weight is the neuron's threshold, so that the gate matmul
itself produces the pattern.
"""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
from jax.scipy.stats import norm

DEAD = 0.3
RECORDED = Path(__file__).parent / "data" / "recorded.npz"


def independent(
    key, pattern: str, m: int, d: int, h: int, nnz: float, dtype, *, dead: float = DEAD
):
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


def recorded(key, m: int, d: int, dtype, *, superposed: int = 1):
    """x and w_gate that reproduce layer 1 of a trained model on 16384 consecutive tokens.

    The model has 6 layers, d_model 1024 and H = 5632. It was trained on Python source with an L1
    coefficient of 5e-4; mean nnz is 20. Gradient steps on a squared hinge loss fit x to the pattern
    for a random w_gate. `superposed` copies of the pattern, each shifted by 4999 tokens, give a
    denser one.
    """
    bits = np.load(RECORDED)["packed"]
    bits = np.bitwise_or.reduce([np.roll(bits, 4999 * i, axis=0) for i in range(superposed)])
    active = np.unpackbits(bits, axis=1)[:, :5632].astype(bool)
    active = jnp.asarray(np.resize(active, (m, active.shape[1])))
    h = active.shape[1]
    w = jax.random.normal(key, (h, d)) / d**0.5
    w = w.at[:, -1].set(-0.5).astype(dtype).astype(jnp.float32)

    def loss(x, active, w):
        z = x @ w.T
        return jnp.sum(jnp.square(jax.nn.relu(jnp.where(active, 0.25 - z, 0.25 + z))))

    @jax.jit
    def fit(active, w):
        x = (active @ w).at[:, -1].set(1.0)

        def step(_, x):
            return (x - 0.2 * jax.grad(loss)(x, active, w)).at[:, -1].set(1.0)

        return jax.lax.fori_loop(0, 60, step, x)

    chunks = [fit(active[i : i + 4096].astype(jnp.float32), w) for i in range(0, m, 4096)]
    return jnp.concatenate(chunks).astype(dtype), w.astype(dtype)


def with_heavy_rows(x, every: int, thresholds: float = -1.0):
    """Makes nearly all neurons active for every `every`-th token, like a sequence's first one.

    `thresholds` is what its gates' thresholds are multiplied by; if it is 0, half of them are
    active.
    """
    return x.at[::every, -1].set(thresholds)


def with_padding(x, length: int = 2048):
    """Replaces the second half of every `length` tokens by one token, as in padded sequences."""
    token = jnp.arange(len(x))
    return x[jnp.where(token % length < length // 2, token, token // length * length + length // 2)]

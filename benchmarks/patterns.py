"""Draws inputs and gate weights with the pattern of a trained model (`analysis.patterns`)."""

from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np

RECORDED = Path(__file__).parent / "data" / "recorded.npz"


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


def with_padding(x, length: int = 2048):
    """Replaces the second half of every `length` tokens by one token, as in padded sequences."""
    token = jnp.arange(len(x))
    return x[jnp.where(token % length < length // 2, token, token // length * length + length // 2)]

"""`sparse_ffn` on plain arrays, with Optax: learns 256 key-value pairs with few neurons each.

Run it with `python examples/plain_jax.py`; it takes a few seconds on a CPU. Biases help so narrow a
block to close its gates. Kernels serve blocks without them, in bfloat16, with a WIDTH from 128 on.
"""

import argparse

import jax
import jax.numpy as jnp
import optax

from twell_jax import Biases, explain, sparse_ffn

FACTS, WIDTH, NEURONS = 256, 64, 512
L1_COEFFICIENT = 3e-3

argparse.ArgumentParser(description=__doc__).parse_args()
keys, values = jax.random.normal(jax.random.key(1), (2, FACTS, WIDTH))


def init(key: jax.Array) -> dict[str, jax.Array]:
    """Draws weights. They are neuron-major, [NEURONS, WIDTH]: row n of each is neuron n's."""
    gate, up, down = jax.random.split(key, 3)
    return {
        "w_gate": jax.random.normal(gate, (NEURONS, WIDTH)) / WIDTH**0.5,
        "w_up": jax.random.normal(up, (NEURONS, WIDTH)) / WIDTH**0.5,
        "w_down": jax.random.normal(down, (NEURONS, WIDTH)) / NEURONS**0.5,
        "biases": Biases(gate=jnp.zeros(NEURONS), down=jnp.zeros(WIDTH)),
    }


def loss(params):
    y, stats = sparse_ffn(keys, **params)
    error = jnp.mean((y - values) ** 2)
    return error + L1_COEFFICIENT * stats.l1, (error, stats)


@jax.jit
def step(params, optimizer_state):
    grads, (error, stats) = jax.grad(loss, has_aux=True)(params)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, error, stats


optimizer = optax.adam(1e-2)
params = init(jax.random.key(0))
optimizer_state = optimizer.init(params)
print(explain(keys, **params))  # what serves this call here, and why nothing else does
for i in range(1001):
    params, optimizer_state, error, stats = step(params, optimizer_state)
    if i % 250 == 0:
        print(f"step {i}: error {error:.4f}, neurons per key: {stats.nnz:.0f}")

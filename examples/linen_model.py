"""`SparseMLP` in a Flax Linen model: `nnx.bridge.to_linen` turns it into a Linen module.

Run it with `python examples/linen_model.py`; it takes a few seconds on a CPU.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import linen, nnx

from twell_jax import SparseMLP

MODULUS, WIDTH, NEURONS = 31, 64, 256
L1_COEFFICIENT = 6e-2


class Adder(linen.Module):
    """Embeds two numbers, applies a sparse residual block, returns logits of their sum."""

    @linen.compact
    def __call__(self, numbers):
        x = linen.Embed(MODULUS, WIDTH // 2)(numbers).reshape(len(numbers), WIDTH)
        mlp = nnx.bridge.to_linen(SparseMLP, WIDTH, NEURONS)
        y, stats = mlp(x, return_stats=True)
        return linen.Dense(MODULUS)(x + y), stats


argparse.ArgumentParser(description=__doc__).parse_args()
model, optimizer = Adder(), optax.adam(3e-3)


@jax.jit
def step(params, optimizer_state, numbers, sums):
    def loss(params):
        logits, stats = model.apply({"params": params}, numbers)
        error = optax.softmax_cross_entropy_with_integer_labels(logits, sums).mean()
        return error + L1_COEFFICIENT * stats.l1, (error, stats)

    grads, (error, stats) = jax.grad(loss, has_aux=True)(params)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return optax.apply_updates(params, updates), optimizer_state, error, stats


a, b = jnp.divmod(jnp.arange(MODULUS**2), MODULUS)
numbers, sums = jnp.stack([a, b], axis=1), (a + b) % MODULUS
params = model.init(jax.random.key(0), numbers)["params"]
optimizer_state = optimizer.init(params)
for i in range(301):
    params, optimizer_state, error, stats = step(params, optimizer_state, numbers, sums)
    if i % 100 == 0:
        print(f"step {i}: cross-entropy {error:.3f}, neurons per input: {stats.nnz:.0f}")

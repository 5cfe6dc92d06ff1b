"""`SparseMLP` in a Flax NNX model: a residual network learns to add modulo 31 with few neurons.

Run it with `python examples/nnx_model.py`; it takes a few seconds on a CPU.
"""

import argparse

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from twell_jax import SparseMLP, capture_stats

MODULUS, WIDTH, NEURONS = 31, 64, 256
L1_COEFFICIENT = 6e-2


class Adder(nnx.Module):
    """Embeds two numbers, applies two sparse residual blocks, returns logits of their sum."""

    def __init__(self, rngs: nnx.Rngs):
        self.embed = nnx.Embed(MODULUS, WIDTH // 2, rngs=rngs)
        # A SparseMLP is called like other modules, so it also fits into nnx.Sequential.
        self.blocks = nnx.List([SparseMLP(WIDTH, NEURONS, rngs=rngs) for _ in range(2)])
        self.head = nnx.Linear(WIDTH, MODULUS, rngs=rngs)

    def __call__(self, numbers: jax.Array) -> jax.Array:
        x = self.embed(numbers).reshape(len(numbers), WIDTH)
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@nnx.jit
def step(model, optimizer, numbers, sums):
    def loss(model):
        # capture_stats collects the statistics of all SparseMLPs; the model need not return them.
        logits, stats = capture_stats(model)(numbers)
        error = optax.softmax_cross_entropy_with_integer_labels(logits, sums).mean()
        return error + L1_COEFFICIENT * stats.l1, (error, stats)

    grads, (error, stats) = nnx.grad(loss, has_aux=True)(model)
    optimizer.update(model, grads)
    return error, stats


argparse.ArgumentParser(description=__doc__).parse_args()
a, b = jnp.divmod(jnp.arange(MODULUS**2), MODULUS)
numbers, sums = jnp.stack([a, b], axis=1), (a + b) % MODULUS
model = Adder(nnx.Rngs(0))
optimizer = nnx.Optimizer(model, optax.adam(3e-3), wrt=nnx.Param)
for i in range(301):
    error, stats = step(model, optimizer, numbers, sums)
    if i % 100 == 0:
        active = ", ".join(f"{block.nnz:.0f}" for block in stats.modules.values())
        print(f"step {i}: cross-entropy {error:.3f}, neurons per input: {active}")

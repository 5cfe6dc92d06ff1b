"""`sparse_ffn` in an Equinox model: a residual network learns to add modulo 31 with few neurons.

Run it with `python examples/equinox_model.py`; it needs Equinox and takes a few seconds on a CPU.
"""

import argparse

import equinox as eqx
import jax
import jax.numpy as jnp
import optax

from twell_jax import sparse_ffn

MODULUS, WIDTH, NEURONS = 31, 64, 256
L1_COEFFICIENT = 6e-2


class Adder(eqx.Module):
    """Embeds two numbers, applies a sparse residual block, returns logits of their sum."""

    embed: jax.Array
    weights: dict[str, jax.Array]
    head: jax.Array

    def __init__(self, key: jax.Array):
        embed, head, *keys = jax.random.split(key, 5)
        self.embed = jax.random.normal(embed, (MODULUS, WIDTH // 2))
        # All three are neuron-major, [NEURONS, WIDTH]: row n of each belongs to neuron n.
        init, names = jax.nn.initializers.normal(WIDTH**-0.5), ("w_gate", "w_up", "w_down")
        self.weights = {n: init(k, (NEURONS, WIDTH)) for n, k in zip(names, keys, strict=True)}
        self.head = init(head, (WIDTH, MODULUS))

    def __call__(self, numbers: jax.Array):
        x = self.embed[numbers].reshape(len(numbers), WIDTH)
        y, stats = sparse_ffn(x, **self.weights)  # of all inputs at once: no jax.vmap around it
        return (x + y) @ self.head, stats


argparse.ArgumentParser(description=__doc__).parse_args()
model, optimizer = Adder(jax.random.key(0)), optax.adam(3e-3)


@eqx.filter_jit
def step(model, optimizer_state, numbers, sums):
    def loss(model):
        logits, stats = model(numbers)
        error = optax.softmax_cross_entropy_with_integer_labels(logits, sums).mean()
        return error + L1_COEFFICIENT * stats.l1, (error, stats)

    grads, (error, stats) = eqx.filter_grad(loss, has_aux=True)(model)
    updates, optimizer_state = optimizer.update(grads, optimizer_state)
    return eqx.apply_updates(model, updates), optimizer_state, error, stats


a, b = jnp.divmod(jnp.arange(MODULUS**2), MODULUS)
numbers, sums = jnp.stack([a, b], axis=1), (a + b) % MODULUS
optimizer_state = optimizer.init(eqx.filter(model, eqx.is_array))
for i in range(301):
    model, optimizer_state, error, stats = step(model, optimizer_state, numbers, sums)
    if i % 100 == 0:
        print(f"step {i}: cross-entropy {error:.3f}, neurons per input: {stats.nnz:.0f}")

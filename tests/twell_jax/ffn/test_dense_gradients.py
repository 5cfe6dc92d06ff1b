"""Gradients by dense products that stand for the kernels'."""

import jax.numpy as jnp
import numpy as np

from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests import seeds
from twell_jax.ffn import dense_gradients

# Less than half of what bfloat16 tells apart at 1, about which the gradients for h are.
L1 = 2.0**-12


def test_a_penalty_that_is_small_beside_the_gradient_is_not_rounded_away():
    rng, m, d, h = seeds.rng(), 256, 128, 1024
    x, dy, up, down = (
        rng.standard_normal(s).astype(jnp.bfloat16) for s in ((m, d), (m, d), (h, d), (h, d))
    )
    x, down = np.abs(x), (down / 8).astype(jnp.bfloat16)
    up = np.abs(up).astype(jnp.bfloat16)  # all neurons are active, and pull dx the same way
    weights, l1_grad = Weights(None, up, down), jnp.float32(L1)
    # Not compiled as a whole, as XLA on a CPU leaves out roundings to bfloat16.
    dx, _ = dense_gradients.of_operands(RELU, False, x, weights, dy, l1_grad, None)
    dx, dy, up, down = (np.asarray(a, np.float64) for a in (dx, dy, up, down))
    from_penalty = np.mean(dx - dy @ down.T @ up, axis=0)
    np.testing.assert_allclose(from_penalty, L1 * up.sum(axis=0), rtol=0.3)

"""Gradients by dense products that stand for the kernels'."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests import seeds
from tests.equations import equations
from tests.errors import ROUNDING, relative_error
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


@pytest.mark.parametrize("factors", [1, 2])
def test_no_gradient_for_h_of_all_neurons_is_held_in_float32(factors):
    rng, m, d, h = seeds.rng(), 96, 64, 128
    gate = np.maximum(rng.standard_normal((h, m)), 0)
    kept = [gate, gate * rng.standard_normal((h, m))][:factors]
    kept = [a.astype(jnp.bfloat16) for a in kept]
    down, dy = (rng.standard_normal(s).astype(jnp.bfloat16) for s in ((h, d), (m, d)))
    extra, l1_grad = rng.standard_normal((h, m)).astype(np.float32), jnp.float32(0.1)

    def in_parts(*operands):
        return dense_gradients.for_inner_in_parts(RELU, *operands)

    operands = kept, down, dy, l1_grad, extra
    dh = dense_gradients.product(down, dy.T)
    whole = jax.jit(partial(dense_gradients.for_inner, RELU))(kept, dh, l1_grad, extra)
    for found, expected in zip(jax.jit(in_parts)(*operands), whole, strict=True):
        assert found.dtype == jnp.bfloat16
        assert relative_error(found, np.asarray(expected, np.float64)) < ROUNDING
    products = [
        e.outvars[0].aval for e in equations(in_parts, *operands) if "dot" in str(e.primitive)
    ]
    assert products and all(a.dtype == jnp.float32 and a.size <= h * m / 2 for a in products)

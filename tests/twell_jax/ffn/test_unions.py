"""Which way the backward of sparse gradients goes; tests/conformance has what each computes."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kernels import REFERENCE
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests import seeds
from tests.errors import ROUNDING, relative_error
from twell_jax.ffn import dense_gradients, unions
from twell_jax.ffn.algorithms import CAPACITY
from twell_jax.ffn.residuals import Way, dense_is_faster


@pytest.mark.parametrize(
    ("listed", "faster"), [(0.2, False), (0.5, False), (0.746, False), (0.972, True), (1.0, True)]
)
def test_dense_products_for_weights_are_faster_where_lists_are_long(listed, faster):
    assert dense_is_faster(listed) == faster
    assert dense_is_faster(jnp.float32(listed)) == faster


@pytest.mark.parametrize(("capacity", "ways"), [(CAPACITY, 4), (1.0, 6)])
def test_dense_products_are_compiled_only_where_they_may_be_needed(capacity, ways):
    x, w = (jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (300, 256))
    operands = x, Weights(w, w, w)
    forward, backward = (
        functools.partial(f, REFERENCE, RELU, capacity=capacity)
        for f in (unions.forward_with_residuals, unions.backward)
    )
    _, residuals = jax.eval_shape(forward, *operands)
    l1_grad = jax.ShapeDtypeStruct((), jnp.float32)
    program = jax.make_jaxpr(backward)(residuals, *operands, x, l1_grad)
    (choice,) = [eqn for eqn in program.eqns if eqn.primitive.name == "cond"]
    assert len(choice.params["branches"]) == ways


def test_as_many_heavy_tokens_as_a_tile_has_fit():
    x = jnp.tile(jnp.eye(256, dtype=jnp.bfloat16), (2, 1))  # each tile has a token for each neuron
    w = jnp.eye(256, dtype=jnp.bfloat16)
    forward = functools.partial(unions.forward_with_residuals, REFERENCE, RELU, capacity=0.5)
    _, residuals = jax.jit(forward)(x, Weights(w, w, w))
    assert residuals.heavy[: int(residuals.heavy_count[0])].tolist() == [*range(256, 512)]
    assert residuals.way(512, 0.5) == Way.SPARSE_AND_HEAVY  # as one tile of two fits


@pytest.mark.parametrize(("heavy", "way"), [(64, Way.SPARSE_AND_FEW), (65, Way.SPARSE_AND_HEAVY)])
def test_no_heavy_token_is_lost_between_two_ways(heavy, way):
    rng = seeds.rng()
    x, w, dy = (rng.integers(-2, 3, (n, 128)) / 4 for n in (1024, 512, 1024))
    x[:, 0], w[:, 0], x[3 : 3 + 15 * heavy : 15, 0] = -6, 1, 6
    x, w, dy = (jnp.asarray(a, jnp.bfloat16) for a in (x, w, dy))
    weights, l1_grad = Weights(w, w, w), jnp.float32(0)
    forward, backward = (
        jax.jit(functools.partial(f, REFERENCE, RELU, capacity=0.7))
        for f in (unions.forward_with_residuals, unions.backward)
    )
    _, residuals = forward(x, weights)
    assert residuals.way(1024, 0.7) == way and residuals.heavy_count == heavy
    found = backward(residuals, x, weights, dy, l1_grad)
    expected = dense_gradients.of_operands(RELU, False, x, weights, dy, l1_grad, None)
    for a, b in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert relative_error(a, b) < 4 * ROUNDING

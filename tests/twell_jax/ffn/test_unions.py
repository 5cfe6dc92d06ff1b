"""Which way the backward of sparse gradients goes; tests/conformance has what each computes."""

import functools

import jax
import jax.numpy as jnp
import pytest

from pallas_kernels.kernels import REFERENCE
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from twell_jax.ffn import unions
from twell_jax.ffn.algorithms import CAPACITY


@pytest.mark.parametrize(
    ("listed", "faster"), [(0.2, False), (0.5, False), (0.746, False), (0.972, True), (1.0, True)]
)
def test_dense_products_for_weights_are_faster_where_lists_are_long(listed, faster):
    assert unions.dense_is_faster(listed) == faster
    assert unions.dense_is_faster(jnp.float32(listed)) == faster


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
    assert residuals.way(512, 0.5) == unions.Way.SPARSE_AND_HEAVY  # as one tile of two fits

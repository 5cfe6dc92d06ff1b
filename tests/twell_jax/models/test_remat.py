"""What layers keep for the backward pass: rematerialised, in a loop and unrolled."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.devices import H100
from tests.equations import equations, kernel_calls
from tests.twell_jax.drawn import small as make
from tests.twell_jax.models.small import assert_close, draw_tokens, loss_and_gradients


@pytest.mark.parametrize("remat", ["dots", pytest.param("block", marks=pytest.mark.slow)])
def test_remat_changes_neither_loss_nor_gradients(remat):
    (plain, module), tokens = (make(remat=kind) for kind in ("none", remat)), draw_tokens(2, 12)
    nnx.update(module, nnx.state(plain))
    (loss, grads, _), (other_loss, other_grads, _) = (
        loss_and_gradients(of, tokens) for of in (plain, module)
    )
    np.testing.assert_allclose(other_loss, loss, rtol=1e-6)
    jax.tree.map(assert_close, other_grads, grads)


@pytest.mark.slow
@pytest.mark.parametrize("remat", [pytest.param("none", marks=pytest.mark.slow), "block"])
def test_unrolled_layers_are_those_of_the_loop(remat):
    module, tokens = make(remat=remat), draw_tokens(2, 12)
    graph, params = nnx.split(module)

    def step(unroll):
        def loss(params):
            x, stats = nnx.merge(graph, params).hidden(tokens, unroll=unroll)
            return jnp.sum(x**3) + jnp.sum(stats.l1)

        return jax.jit(jax.value_and_grad(loss)).lower(params).compile()

    looped, unrolled = step(False), step(True)
    assert " while(" in looped.as_text() and " while(" not in unrolled.as_text()
    (loss, grads), (other_loss, other_grads) = looped(params), unrolled(params)
    np.testing.assert_allclose(other_loss, loss, rtol=1e-5)
    jax.tree.map(assert_close, other_grads, grads)


@pytest.mark.slow
@pytest.mark.parametrize("remat", ["dots", "block"])
def test_unrolled_layers_keep_no_more(remat):
    def temporary_bytes(remat, unroll):
        module = nnx.eval_shape(lambda: make(remat=remat, layers=4))
        graph, params = nnx.split(module)

        def loss(params):
            return nnx.merge(graph, params).hidden(jnp.ones((64, 16), jnp.int32), unroll=unroll)[0]

        gradients = jax.jit(jax.grad(lambda params: jnp.sum(loss(params) ** 2)))
        return gradients.lower(params).compile().memory_analysis().temp_size_in_bytes

    kept = temporary_bytes(remat, unroll=True)
    assert kept < 1.1 * temporary_bytes(remat, unroll=False)
    assert kept < 0.8 * temporary_bytes("none", unroll=True)


def test_remat_keeps_less_between_the_passes():
    def residual_bytes(remat):
        module = nnx.eval_shape(lambda: make(remat=remat, layers=8))
        graph, params = nnx.split(module)

        def loss(params):
            return nnx.merge(graph, params)(jnp.zeros((4, 16), jnp.int32))[0].sum()

        _, pullback = jax.eval_shape(lambda p: jax.vjp(loss, p), params)
        return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(pullback))

    assert residual_bytes("block") < residual_bytes("dots") < residual_bytes("none")


def test_remat_of_all_but_dots_runs_no_kernel_twice():
    shape = {"context": 1024, "d_model": 128, "d_ff": 256, "ffn_gradients": "sparse"}

    def kernels(remat):
        module = nnx.eval_shape(lambda: make(**shape, dtype="bfloat16", remat=remat))
        graph, params = nnx.split(module)

        def loss(params, tokens):
            return nnx.merge(graph, params)(tokens)[0].sum()

        tokens = jax.ShapeDtypeStruct((1, 1024), jnp.int32)
        with jax.sharding.use_abstract_mesh(H100):
            return kernel_calls(jax.grad(loss), params, tokens)

    assert 0 < kernels("none") == kernels("dots") < kernels("block")


@pytest.mark.parametrize("unroll", [True, False])
@pytest.mark.parametrize("remat", ["none", "dots", "block"])
def test_matrices_are_converted_to_the_compute_dtype_once(remat, unroll):
    """All layers at once, before both passes; the gradients come back likewise."""
    module = nnx.eval_shape(lambda: make(remat=remat, layers=3, dtype="bfloat16"))
    graph, params = nnx.split(module)

    def loss(params, tokens):
        x, _ = nnx.merge(graph, params).hidden(tokens, unroll=unroll)
        return jnp.sum(x, dtype=jnp.float32)

    tokens = jax.ShapeDtypeStruct((2, 16), jnp.int32)
    matrices = [leaf.shape for leaf in jax.tree.leaves(params["blocks"]) if leaf.ndim > 2]
    assert len(matrices) == 7  # four of attention, three of the feed-forward block
    assert {layers for layers, *_ in matrices} == {3}
    of_layers = {shape[1:] for shape in matrices}
    converted = [
        (equation.outvars[0].aval.dtype, equation.outvars[0].aval.shape)
        for equation in equations(jax.grad(loss), params, tokens)
        if equation.primitive.name == "convert_element_type"
    ]
    for dtype in (jnp.bfloat16, jnp.float32):
        assert sorted(s for d, s in converted if d == dtype and s in matrices) == sorted(matrices)
        assert not [s for d, s in converted if d == dtype and s in of_layers]

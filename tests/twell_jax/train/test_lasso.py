"""The tile lasso in training: where the grid begins, what cuts it, what the loss takes of it."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from tests.twell_jax.train.small import END, L1, draw, on_one_device, settings
from twell_jax.config import ConfigError
from twell_jax.ffn import Windows
from twell_jax.models.transformer import graphdef
from twell_jax.train.trainer import lasso_windows


def test_the_grid_begins_elsewhere_in_every_step_and_the_same_when_resumed():
    run = settings(lasso_share=0.5, lasso_window=8)
    offsets = [int(lasso_windows(run, jnp.int32(step)).offset) for step in range(200)]
    assert set(offsets) == set(range(8))
    assert np.bincount(offsets).min() > 10  # 25 expected
    again = jax.jit(functools.partial(lasso_windows, run))(jnp.int32(150))
    assert int(again.offset) == offsets[150] and again.length == 8
    assert lasso_windows(settings(), jnp.int32(0)) is None


def test_windows_end_with_documents():
    model = drawn.transformer(**settings().model.model_dump())
    tokens = seeds.rng().integers(0, END, (1, 12)).astype(np.int32)
    tokens[0, 5] = END

    @functools.partial(nnx.jit, static_argnames="document_end")
    def of(model, tokens, document_end=None):
        windows = Windows(jnp.int32(3), length=1000)
        return model.hidden(tokens, windows=windows, document_end=document_end)[1].lasso

    lasso = functools.partial(of, model)
    whole = np.asarray(lasso(tokens, document_end=END))
    parts = [np.asarray(lasso(tokens[:, part])) * 6 for part in (slice(6), slice(6, 12))]
    assert whole.shape == (2,)
    np.testing.assert_allclose(whole, sum(parts) / 12, rtol=1e-4)
    assert (np.abs(lasso(tokens) / whole - 1) > 0.01).all()  # across documents it is another


@pytest.mark.slow
def test_the_gradient_is_that_of_a_share_of_it():
    run, batch = settings(lasso_share=0.25, lasso_window=6), jnp.asarray(draw())
    trainer = on_one_device(run)
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        params = jax.tree.map(jnp.copy, state.params)
        state, metrics = trainer.step(state, trainer.put_batch(batch), L1)

    @jax.jit
    @jax.value_and_grad
    def loss(params):
        model = nnx.merge(graphdef(run.model), params)
        windows = lasso_windows(run, jnp.int32(0))
        x, stats = model.hidden(batch[:, :-1], windows=windows)
        ce = optax.softmax_cross_entropy_with_integer_labels(model.logits(x), batch[:, 1:])
        penalty = 0.75 * stats.l1 + 0.25 * stats.lasso
        return jnp.mean(ce) + L1 * jnp.mean(penalty)

    value, grads = loss(params)
    metrics, grads, moments = jax.device_get(
        (metrics, grads, optax.tree.get(state.opt_state, "mu"))
    )
    total = metrics.ce + L1 * (0.75 * metrics.l1 + 0.25 * metrics.lasso)
    np.testing.assert_allclose(value, total, rtol=1e-5)
    assert metrics.lasso > 1.05 * metrics.l1
    norm, of_moments = map(norm_of, (grads, moments))
    np.testing.assert_allclose(metrics.grad_norm, norm, rtol=1e-4)
    # Moments are the gradient but for a factor.
    for moment, grad in zip(*map(jax.tree.leaves, (moments, grads)), strict=True):
        np.testing.assert_allclose(moment / of_moments, grad / norm, atol=1e-5)


def norm_of(tree):
    return np.sqrt(sum(np.sum(leaf**2) for leaf in jax.tree.leaves(tree)))


@pytest.mark.parametrize(
    ("model", "changes", "key"),
    [
        ({"ffn_implementation": "mosaic"}, {}, "model.ffn_implementation=null"),
        (
            {"ffn_implementation": "mosaic"},
            {"sparse_gradients_every": 5},
            "model.ffn_implementation=null",
        ),
        (
            {"ffn_gradients": "sparse"},
            {"data": {"mask_documents": True}},
            "model.ffn_gradients=null, data.mask_documents=false",
        ),
        (
            {"ffn_implementation": "mosaic", "ffn_gradients": "sparse"},
            {"data": {"mask_documents": True}},
            "model.ffn_implementation=null and model.ffn_gradients=null, data.mask_documents=false",
        ),
        (  # without data.mask_documents, kernels with dense gradients could not either
            {"ffn_implementation": "mosaic"},
            {"sparse_gradients_every": 5, "data": {"mask_documents": True}},
            "model.ffn_implementation=null and sparse_gradients_every=0",
        ),
        (
            {},
            {"sparse_gradients_every": 5, "data": {"mask_documents": True}},
            "sparse_gradients_every=0, data.mask_documents=false",
        ),
    ],
)
def test_a_run_that_asks_for_more_kernels_than_have_it_is_told(model, changes, key):
    settings(model=model, **changes)
    with pytest.raises(
        ConfigError, match=f"^lasso_share: .*kernels .*; write {key}, or lasso_"
    ) as error:
        settings(model=model, lasso_share=0.1, **changes)
    assert ("with data.mask_documents its windows" in str(error.value)) == ("data" in changes)

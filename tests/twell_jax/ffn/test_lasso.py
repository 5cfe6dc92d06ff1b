"""The tile lasso against sums over windows that NumPy cuts, for every kind of window."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx
from hypothesis import strategies as st

from tests import seeds
from twell_jax import SparseMLP, sparse_ffn
from twell_jax.ffn import Windows
from twell_jax.ffn.lasso import tile_lasso

lasso_and_grad = jax.jit(jax.value_and_grad(tile_lasso))


def draw(*shape):
    """Hidden activations, mostly zero, in some windows all zero."""
    rng = seeds.rng()
    h = rng.standard_normal(shape) * (rng.random(shape) < 0.3)
    return (h * (rng.random((*shape[:-2], 1, shape[-1])) < 0.8)).astype(np.float32)


def cut(documents, offset, length):
    """Lists of tokens of one sequence, one for each window."""
    windows, key = [], None
    for token, document in enumerate(documents):
        before, key = key, ((token + offset) // length, document)
        if document < 0:
            key = None
        elif key == before:
            windows[-1].append(token)
        else:
            windows.append([token])
    return windows


def reference(h, documents, offset, length):
    """The lasso and its gradient, float64."""
    h = h.astype(np.float64)
    total, grad, tokens = 0.0, np.zeros_like(h), np.count_nonzero(documents >= 0)
    for sequence, (rows, ids) in enumerate(zip(h, documents, strict=True)):
        for window in cut(ids, offset, length):
            norms = np.sqrt(np.sum(rows[window] ** 2, axis=0))
            total += np.sqrt(len(window)) * norms.sum()
            safe = np.where(norms > 0, norms, 1)
            grad[sequence, window] = np.sqrt(len(window)) * rows[window] / safe
    return total / max(tokens, 1), grad / max(tokens, 1)


def assert_lasso(h, documents, offset, length, given):
    windows = Windows(jnp.int32(offset), given, length)
    value, grad = lasso_and_grad(h, windows)
    expected, grad_ref = reference(h, documents, offset, length)
    np.testing.assert_allclose(value, expected, rtol=1e-5, atol=1e-7)
    np.testing.assert_allclose(grad, grad_ref, rtol=1e-5, atol=1e-7)


# Few lengths, as each is a program of its own.
@hypothesis.given(length=st.sampled_from([1, 4, 7, 40]), offset=st.integers(0, 39))
def test_every_offset_of_the_grid(length, offset):
    h, offset = draw(2, 13, 5), offset % length
    assert_lasso(h, np.zeros((2, 13), int), offset, length, None)


ids = st.lists(st.integers(-1, 2), min_size=13, max_size=13)


@hypothesis.given(st.tuples(ids, ids), st.sampled_from([4, 40]), st.integers(0, 39))
@hypothesis.example(documents=2 * (13 * [-1],), length=4, offset=0)  # no tokens at all
def test_documents_and_padding(documents, length, offset):
    documents, offset = np.array(documents, np.int32), offset % length
    assert_lasso(draw(2, 13, 5), documents, offset, length, jnp.asarray(documents))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.uint32])
def test_documents_of_any_integers_for_each_or_all_sequences(dtype):
    h, documents = draw(2, 24, 5), np.repeat(np.arange(4), 6)
    expected = tile_lasso(h, Windows(3, np.stack(2 * [documents]).astype(np.int32), 8))
    for given in (documents, np.stack(2 * [documents])):
        found = tile_lasso(h, Windows(3, given.astype(dtype), 8))
        np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_it_is_l1_for_neurons_that_fire_evenly():
    signs = seeds.rng().choice([-1, 1], (1, 24, 5))
    size = np.repeat(seeds.rng().random((1, 4, 5)), 6, axis=1)  # of a neuron in a window
    h = (signs * size).astype(np.float32)
    value = tile_lasso(h, Windows(jnp.int32(0), length=6))
    np.testing.assert_allclose(value, np.abs(h).sum(axis=-1).mean(), rtol=1e-6)
    alone = np.where(np.arange(24)[:, None] % 6 == 2, h, 0)  # one token of each window
    value = tile_lasso(alone, Windows(jnp.int32(0), length=6))
    np.testing.assert_allclose(value, 6**0.5 * np.abs(alone).sum(axis=-1).mean(), rtol=1e-6)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16])
@pytest.mark.parametrize("size", [0.0, 1e-25, 3.0])
def test_windows_without_and_with_all_activations(size, dtype):
    h = jnp.full((9, 3), size, dtype)
    value, grad = lasso_and_grad(h, Windows(jnp.int32(2), length=4))
    np.testing.assert_allclose(value, 3 * size if size > 1e-19 else 0, rtol=1e-2)
    np.testing.assert_allclose(grad.astype(np.float32), (size > 1e-19) / 9, rtol=1e-2)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False])
def test_it_is_a_statistic_of_the_block_with_gradients_for_its_weights(gated):
    x, *weights = (draw(2, 9, 6), *(seeds.rng().standard_normal((8, 6), np.float32) for _ in "gud"))
    weights = weights if gated else [None, *weights[1:]]
    windows = Windows(jnp.int32(1), length=4)

    def by_block(weights):
        return sparse_ffn(x, *weights, windows=windows)[1].lasso

    def by_hand(weights):
        gate, up, _ = weights
        first = jax.nn.relu(x @ (up if gate is None else gate).T)
        return tile_lasso(first if gate is None else first * (x @ up.T), windows)

    ours, expected = (jax.jit(jax.value_and_grad(f))(weights) for f in (by_block, by_hand))
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-6), ours, expected
    )
    assert sparse_ffn(x, *weights)[1].lasso is None


def test_a_module_takes_windows():
    mlp = SparseMLP(8, 24, rngs=nnx.Rngs(seeds.integer()))
    x, windows = draw(2, 9, 8), Windows(jnp.int32(0), length=1)
    _, stats = mlp(x, return_stats=True, windows=windows)
    np.testing.assert_allclose(stats.lasso, stats.l1, rtol=1e-5)  # a window of one token

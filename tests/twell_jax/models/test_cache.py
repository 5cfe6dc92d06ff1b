"""Keys and values that are stored in 8 bits."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.quantised import Quantised
from tests import seeds
from tests.errors import relative_error
from tests.twell_jax import drawn
from twell_jax.models import KVCache, graphdef

CAPACITY, LENGTHS = 16, np.array([7, 4], np.int32)
decode = nnx.jit(lambda model, tokens, cache: model.decode(tokens, cache))


@pytest.fixture
def models():
    """The same model, of which the second stores keys and values in 8 bits."""
    exact = drawn.small(vocab_size=61, kv_heads=2)
    changes = {"kv_cache_dtype": "float8"}
    return exact, nnx.merge(graphdef(exact.config.model_copy(update=changes)), nnx.state(exact))


@pytest.fixture
def tokens():
    return seeds.rng().integers(0, 61, (2, 12), dtype=np.int32)


def prefill(model, tokens):
    read = nnx.jit(lambda model, prompt: model.prefill(prompt, CAPACITY, LENGTHS))
    return read(model, tokens[:, :7])


def numbers(stored):
    """The numbers that a cache stands for, float32 `[layers, B, S, kv_heads, head_dim]`."""
    if not isinstance(stored, Quantised):
        return np.asarray(stored, np.float32)
    scale = np.swapaxes(np.asarray(stored.scale), 2, 3)[..., None]
    return np.asarray(stored.values, np.float32) * scale


def test_numbers_are_rounded_to_8_bits_with_a_scale_for_each_token_and_head(models, tokens):
    exact, rounded = (prefill(model, tokens)[1] for model in models)
    is_token = (np.arange(CAPACITY) < LENGTHS[:, None])[None, :, :, None, None]
    for name in ("k", "v"):
        ours, theirs = (numbers(getattr(cache, name)) for cache in (rounded, exact))
        # Of the first layer, whose tokens are the same, four significant bits.
        ours, theirs = (np.where(is_token, a, 0)[0] for a in (ours, theirs))
        largest = np.max(np.abs(theirs), axis=-1, keepdims=True)
        assert np.all(np.abs(ours - theirs) <= np.maximum(np.abs(theirs) / 15, largest / 2**17))
        assert relative_error(ours, theirs) > 0.01


def test_a_token_more_is_stored_as_those_of_a_prompt_are(models, tokens):
    _, model = models
    _, cache = prefill(model, tokens)
    _, written = decode(model, tokens[:, :7], KVCache.empty(model.config, 2, CAPACITY))
    for name in ("k", "v"):
        ours, theirs = (
            np.stack([numbers(getattr(c, name))[:, i, :4] for i in (0, 1)])
            for c in (cache, written)
        )
        # Later layers have read what is rounded, or what is not.
        np.testing.assert_array_equal(ours[:, 0], theirs[:, 0])
        assert relative_error(ours, theirs) < 0.1


def test_logits_are_near_those_of_an_exact_cache(models, tokens):
    found = []
    for model in models:
        logits, cache = prefill(model, tokens)
        found.append([logits])
        for step in range(7, 12):
            logits, cache = decode(model, tokens[:, step, None], cache)
            found[-1].append(logits)
    (first, *exact), (prompt, *rounded) = found
    np.testing.assert_array_equal(first, prompt)  # whose keys and values come from no cache
    # A number is up to a sixteenth off, and so are sums of values; scores change, too.
    assert 0.001 < relative_error(np.stack(rounded), np.stack(exact)) < 0.25


def test_slots_without_a_token_have_no_influence(models, tokens):
    _, model = models
    _, cache = prefill(model, tokens)
    is_free = (np.arange(CAPACITY) >= LENGTHS[:, None])[None, :, :, None, None]

    def filled(stored, value):
        scale_is_free = np.swapaxes(is_free[..., 0], 2, 3)
        return Quantised(
            jnp.where(is_free, jnp.asarray(value, stored.values.dtype), stored.values),
            jnp.where(scale_is_free, value, stored.scale),
        )

    found = []
    for value in (0.0, np.nan):
        full = dataclasses.replace(cache, k=filled(cache.k, value), v=filled(cache.v, value))
        found.append(decode(model, tokens[:, 7:8], full)[0])
    np.testing.assert_array_equal(*found)


def test_it_takes_half_of_the_memory(models):
    exact, rounded = (
        sum(a.nbytes for a in jax.tree.leaves(KVCache.empty(m.config, 2, CAPACITY))) for m in models
    )
    size = models[0].config.head_dim * jnp.dtype(models[0].config.dtype).itemsize
    assert rounded < exact * (models[0].config.head_dim + 5) / size

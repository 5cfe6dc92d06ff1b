import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import seeds
from tests.equations import equations
from twell_jax.inference.sampling import GREEDY, Sampling, sample


def draws(logits, count, **options):
    """`count` tokens for the one row of `logits`."""
    keys = jax.random.split(jax.random.key(seeds.integer()), count)
    draw = jax.jit(jax.vmap(lambda key: sample(logits, key, Sampling(**options))[0]))
    return np.asarray(draw(keys))


@pytest.mark.parametrize(
    "sampling", [GREEDY, Sampling(top_k=1), Sampling(top_p=1e-6), Sampling(min_p=1.0)]
)
def test_the_narrowest_choice_is_the_most_likely_token(sampling):
    logits = jnp.asarray(seeds.rng().standard_normal((5, 40)), jnp.float32)
    tokens = sample(logits, jax.random.key(0), sampling)
    np.testing.assert_array_equal(tokens, np.argmax(logits, axis=-1))
    assert tokens.dtype == jnp.int32


def test_rules_that_keep_every_token_change_no_draw():
    logits = jnp.asarray(seeds.rng().standard_normal((50, 40)), jnp.float32)
    key = jax.random.key(seeds.integer())
    free = sample(logits, key, Sampling())
    for options in ({"top_k": 40}, {"top_k": 1000}, {"min_p": 1e-9}, {"top_p": 0.9999999}):
        np.testing.assert_array_equal(sample(logits, key, Sampling(**options)), free)


def test_the_vocabulary_is_sorted_only_where_probabilities_are_added_up():
    def operations(**options):
        choose = functools.partial(sample, key=jax.random.key(0), sampling=Sampling(**options))
        made = equations(choose, jax.ShapeDtypeStruct((8, 40), jnp.float32))
        return {equation.primitive.name for equation in made}

    assert "sort" in operations(top_p=0.9)
    assert "sort" not in operations(temperature=0.8, min_p=0.1)


def test_frequencies_follow_the_temperature():
    logits, temperature, count = jnp.array([[0.0, 1.0, 2.0, -1.0]]), 0.7, 20000
    frequencies = np.bincount(draws(logits, count, temperature=temperature), minlength=4) / count
    expected = np.exp(np.array([0, 1, 2, -1]) / temperature)
    expected /= expected.sum()
    assert np.all(np.abs(frequencies - expected) < 6 * np.sqrt(expected / count) + 1e-3)


@pytest.mark.parametrize(
    ("options", "kept"),
    [
        ({"top_k": 3}, {1, 3, 2}),
        ({"top_k": 9}, {0, 1, 2, 3, 4}),
        ({"top_p": 0.65}, {1, 3}),
        ({"top_p": 0.75}, {1, 3, 2}),
        ({"top_p": 0.75, "top_k": 2}, {1, 3}),
        ({"top_p": 0.8, "top_k": 3}, {1, 3}),  # 0.7 of the 0.85 that top_k has left
        ({"min_p": 0.2}, {1, 3, 2, 4}),
        ({"min_p": 0.3}, {1, 3, 2}),
        ({"min_p": 0.3, "top_k": 2}, {1, 3}),
    ],
)
def test_only_the_likely_tokens_are_kept(options, kept):
    logits = jnp.log(jnp.array([[0.05, 0.4, 0.15, 0.3, 0.1]]))
    assert set(draws(logits, 500, **options)) == kept


@pytest.mark.parametrize(
    ("name", "value"),
    [
        *(("temperature", value) for value in (-1.0, float("nan"), 1e-40, float("inf"), "1", True)),
        *(("top_k", value) for value in (2**31, 0, 1.5, True)),
        *(("top_p", value) for value in (0.0, 1.5)),
        *(("min_p", value) for value in (-0.1, 2.0)),
    ],
)
def test_bad_options_are_named(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be"):
        Sampling(**{name: value})

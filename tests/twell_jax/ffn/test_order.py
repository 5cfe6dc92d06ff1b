"""With neurons in order of use, lists are short, and ordinary tokens are not outlying.

Reference for lists and outlying tokens: the pattern itself, counted densely.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from pallas_kernels.layouts.tile_union import OUTLYING_ABOVE
from tests import seeds
from twell_jax.ffn import order_by_use
from twell_jax.ffn.stats import NOT_MEASURED

TOKENS, TILE, NEURONS = 4096, 256, 1408


def skewed(nnz):
    """bool [TOKENS, NEURONS]: 30 % are never active, the others with log-normal frequencies."""
    rng = seeds.rng()
    p = np.exp(1.5 * rng.standard_normal(NEURONS)) * (rng.random(NEURONS) > 0.3)
    for _ in range(20):
        p = np.minimum(p * (nnz / p.sum()), 0.9)
    return rng.random((TOKENS, NEURONS)) < p


def of_groups(active):
    """int [TOKENS, NEURONS / 64], each token's non-zeros in each group of 64 neurons."""
    return active.reshape(TOKENS, -1, 64).sum(axis=-1)


@pytest.mark.parametrize("nnz", [8, 20])
def test_lists_are_short_and_ordinary_tokens_are_not_outlying(nnz):
    layers = [skewed(nnz), skewed(nnz / 2)]
    tiles = np.array([a.reshape(-1, TILE, NEURONS).any(axis=1).sum(axis=0) for a in layers])
    means = np.array([a.sum(axis=1).mean() for a in layers], np.float32)
    orders = np.asarray(jax.jit(jax.vmap(order_by_use))(tiles.astype(np.int32), means))
    for active, order in zip(layers, orders, strict=True):
        before, after = of_groups(active), of_groups(active[:, order])
        assert (after > 0).mean() < 0.75 * (before > 0).mean()
        assert (after > OUTLYING_ABOVE).any(axis=1).mean() < 0.01


@given(hnp.arrays(np.int32, 300, elements=st.integers(0, 3)), st.floats(0, 300))
def test_orders_hold_each_neuron_once_and_those_that_did_not_fire_come_last(tiles, nnz):
    order = np.asarray(order_by_use(jnp.asarray(tiles), jnp.float32(nnz)))
    np.testing.assert_array_equal(np.sort(order), np.arange(300))
    np.testing.assert_array_equal(order[(tiles > 0).sum() :], np.flatnonzero(tiles == 0))


def test_what_was_not_measured_changes_no_order():
    order = order_by_use(jnp.full(300, NOT_MEASURED, jnp.int32), jnp.float32(20))
    np.testing.assert_array_equal(order, np.arange(300))

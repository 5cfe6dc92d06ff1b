"""The capacity that a pattern needs, from packed and from dense gates, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pattern_shares
from pallas_kernels.layouts import neuron_lists, tile_union
from tests import seeds
from tests.pattern_shares import shares

of_dense = jax.jit(pattern_shares.of_dense, static_argnums=1)


@jax.jit
def both(gate):
    """By the packed form, and by the dense one."""
    _, masks, counts = tile_union.describe(gate, jnp.isfinite(gate[:, ::64]))
    needs = tile_union.needs_of(tile_union.stats_of_tiles(masks, counts, len(gate)), gate.shape[1])
    slots = jnp.sum(neuron_lists.slots_for(neuron_lists.list_lengths(counts, len(gate))))
    return pattern_shares.of_packed(needs[0], slots, *gate.shape), pattern_shares.of_dense(gate)


def draw(m, h, density, heavy_every=None):
    """bfloat16; each neuron has a density of its own, some tokens have nearly all active."""
    rng = seeds.rng()
    active = rng.random((m, h)) < density * rng.exponential(size=h)
    if heavy_every:
        active[3::heavy_every] = rng.random((len(active[3::heavy_every]), h)) < 0.9
    return (active * rng.uniform(0.5, 2, (m, h))).astype(jnp.bfloat16)


@pytest.mark.sampled(6)
@pytest.mark.parametrize("density", [0, 0.003, 0.05, 1e9])
@pytest.mark.parametrize(("m", "h"), [(1, 128), (70, 384), (600, 1408), (512, 256)])
def test_packed_and_dense_gates_agree_with_numpy(m, h, density):
    gate = draw(m, h, density)
    for ours in both(gate):
        np.testing.assert_allclose(ours, shares(gate), rtol=1e-6)


@pytest.mark.parametrize(("heavy_every", "leave"), [(2, False), (20, True), (300, True)])
def test_tokens_that_leave_do_not_count_in_the_union(heavy_every, leave):
    gate = draw(1280, 1408, 0.006, heavy_every)
    expected = shares(gate)
    for ours in both(gate):
        np.testing.assert_allclose(ours, expected, rtol=1e-6)
    if_all_stay, _ = shares(gate, most_heavy=0)
    assert (expected[0] < 0.9 * if_all_stay) == leave


def test_16_neurons_of_a_group_are_usual_and_17_are_not():
    gate = np.zeros((256, 1408), jnp.bfloat16)
    gate[:60, :16] = 1  # were they outlying, too many tokens would have to leave
    expected = shares(gate)
    gate[60].reshape(-1, 64)[:, :17] = 1
    assert shares(gate)[0] == expected[0] == 1 / 11
    for ours in both(gate):
        np.testing.assert_allclose(ours, shares(gate), rtol=1e-6)


def test_more_tokens_leave_on_more_devices():
    gate = draw(1300, 1408, 0.003, 4)  # 325 tokens would leave, 64 of each whole tile
    on_one, on_two = (shares(gate, most_heavy=256 * devices) for devices in (1, 2))
    np.testing.assert_allclose(of_dense(gate, 1), on_one, rtol=1e-6)
    np.testing.assert_allclose(of_dense(gate, 2), on_two, rtol=1e-6)
    assert on_two[0] < on_one[0]


@pytest.mark.parametrize(("m", "h"), [(1, 5), (257, 100), (300, 200)])
def test_dense_activations_may_have_any_number_of_neurons(m, h):
    active = draw(m, h, 0.05).reshape(1, m, h)
    np.testing.assert_allclose(of_dense(active, 1), shares(active[0]), rtol=1e-6)

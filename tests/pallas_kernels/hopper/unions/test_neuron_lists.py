import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental import pallas as pl

from pallas_kernels.hopper.unions.neuron_lists import neuron_lists
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts.neuron_lists import NeuronLists, list_lengths, slots_for
from pallas_kernels.layouts.tile_union import TILE_TOKENS
from tests import seeds

slots_of = jax.jit(NeuronLists.slots)
LISTERS = [
    pytest.param(jax.jit(REFERENCE.neuron_lists, static_argnums=(1, 2)), id="reference"),
    pytest.param(
        jax.jit(neuron_lists, static_argnums=(1, 2)), marks=pytest.mark.gpu, id="neuron_lists"
    ),
]


def draw(groups, m, density, rng):
    """Counts, with entries to ignore, and `used [groups, m]`: which token is in which list."""
    used = rng.random((groups, m)) < density * rng.uniform(0, 2, (groups, 1))
    counts = rng.integers(0, 65, (groups, -(-m // TILE_TOKENS) * TILE_TOKENS))
    counts[:, :m] = np.where(used, np.maximum(counts[:, :m], 1), 0)
    return (counts + 128 * rng.integers(0, 2, counts.shape)).astype(np.uint8), used


def check(lister, counts, used, capacity):
    """Each list holds its tokens, in order and in its own slots; returns the lengths."""
    m = used.shape[1]
    lists, all_lengths = lister(counts, m, int(capacity))
    np.testing.assert_array_equal(all_lengths, used.sum(axis=1))
    np.testing.assert_array_equal(all_lengths, list_lengths(counts, m))
    assert lists.wanted(all_lengths) == needed(used)
    np.testing.assert_array_equal(lists.order, np.argsort(-used.sum(axis=1), stable=True))
    slots = slots_of(lists, np.arange(-(-m // TILE_TOKENS) * TILE_TOKENS))
    arrays = (*jax.device_get(jax.tree.leaves(lists)), np.asarray(all_lengths), np.asarray(slots))
    assert all(a.dtype == np.int32 for a in arrays)
    tokens, starts, lengths, _, _, _, slots = arrays
    assert tokens.shape == (capacity,)
    assert (starts % 64 == 0).all() and (slots[:, m:] == capacity).all()
    end = 0
    for row, start, length, slot in zip(used, starts, lengths, slots, strict=True):
        assert end <= start <= start + length <= capacity
        end = -(-(start + length) // 64) * 64
        listed = np.flatnonzero(row)[:length]
        np.testing.assert_array_equal(tokens[start : start + length], listed)
        np.testing.assert_array_equal(slot[listed], np.arange(start, start + length))
        assert (np.delete(slot, listed) == capacity).all()
    return lengths


def needed(used):
    """The slots that all lists need."""
    return int(slots_for(jnp.asarray(used.sum(axis=1))).sum())


@pytest.mark.parametrize("lister", LISTERS)
@hypothesis.settings(max_examples=8)  # each compiles a program: the capacity is a shape
@hypothesis.given(
    groups=st.sampled_from([1, 6]),
    m=st.sampled_from([1, 257, 700]),
    density=st.sampled_from([0, 0.01, 0.3, 1]),
    seed=st.integers(0, 2**32 - 1),
    excess=st.sampled_from([0, 640]),
)
def test_lists_are_who_uses_what(lister, groups, m, density, seed, excess):
    counts, used = draw(groups, m, density, np.random.default_rng(seed))
    assert needed(used) == sum(-(-row.sum() // 64) * 64 for row in used)
    lengths = check(lister, counts, used, max(64, needed(used) + excess))
    np.testing.assert_array_equal(lengths, used.sum(axis=1))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("lister", LISTERS)
@pytest.mark.parametrize(
    ("groups", "m", "density"),
    [
        (88, 16384, 0.2),
        (34, 600 * TILE_TOKENS + 33, 0.01),
        pytest.param(1024, 300, 0.1, marks=pytest.mark.gpu),
    ],
)
def test_many_tokens_and_many_lists(lister, groups, m, density):
    counts, used = draw(groups, m, density, seeds.rng())
    used[5:7] = used[4]
    counts[5:7] = counts[4]  # as long
    for capacity in (needed(used), needed(used) // 128 * 64):
        check(lister, counts, used, capacity)


@pytest.mark.parametrize("lister", LISTERS)
def test_empty_and_full_lists(lister):
    counts = np.zeros((4, 512), np.uint8)
    counts[[1, 3]] = 64
    lengths = check(lister, counts, counts[:, :500] != 0, 1024)
    np.testing.assert_array_equal(lengths, [0, 500, 0, 500])


@pytest.mark.parametrize("lister", LISTERS)
@pytest.mark.parametrize("capacity", [64, 1024])
def test_lists_that_exceed_the_capacity_are_cut_off(lister, capacity):
    counts, used = draw(6, 700, 0.5, seeds.rng())
    used[0] = True
    counts[0] = 1
    for m in (1, 700):
        of_m = counts[:, : -(-m // TILE_TOKENS) * TILE_TOKENS]
        assert check(lister, of_m, used[:, :m], capacity).sum() <= capacity


def test_interpreted(interpreted):
    counts, used = draw(6, 17 * TILE_TOKENS, 0.3, seeds.rng())
    with interpreted(detect_races=False):  # a twin stores all slots, also those of other lists
        for capacity in (needed(used), 64):
            check(neuron_lists, counts, used, capacity)


@pytest.mark.parametrize(("groups", "m", "capacity"), [(2, 1, 64), (1024, 10**6, 2**24)])
def test_lowers_without_a_gpu(lower, groups, m, capacity):
    counts = jax.ShapeDtypeStruct((groups, pl.cdiv(m, TILE_TOKENS) * TILE_TOKENS), jnp.uint8)
    text = lower(functools.partial(neuron_lists, m=m, capacity=capacity), counts)
    assert text.count("@mosaic_gpu") == 2


def test_bad_operands_are_named():
    call = functools.partial(neuron_lists, jnp.zeros((2, 256), jnp.uint8))
    for capacity in (0, 100):
        with pytest.raises(ValueError, match=f"positive multiple of 64, got {capacity}"):
            call(200, capacity)
    with pytest.raises(ValueError, match=r"counts must be uint8 \[2, 512\].*\[2, 256\]"):
        call(300, 64)
    with pytest.raises(ValueError, match=r"must be uint8 .*int32"):
        neuron_lists(jnp.zeros((2, 256), jnp.int32), 200, 64)

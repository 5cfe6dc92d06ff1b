import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from pallas_kernels.layouts.neuron_lists import NeuronLists, neuron_lists
from pallas_kernels.layouts.tile_union import TILE_TOKENS
from tests import seeds

make = jax.jit(neuron_lists, static_argnums=(1, 2))
slots_of = jax.jit(NeuronLists.slots)


def draw(blocks, m, density, rng):
    """Counts, with entries to ignore, and `used [blocks, m]`: which token is in which list."""
    used = rng.random((blocks, m)) < density * rng.uniform(0, 2, (blocks, 1))
    counts = rng.integers(0, 65, (blocks, -(-m // TILE_TOKENS) * TILE_TOKENS))
    counts[:, :m] = np.where(used, np.maximum(counts[:, :m], 1), 0)
    return (counts + 128 * rng.integers(0, 2, counts.shape)).astype(np.uint8), used


def check(lists, used, capacity):
    """Each list holds its tokens, in order and in its own room; returns the lengths."""
    m = used.shape[1]
    slots = slots_of(lists, np.arange(-(-m // TILE_TOKENS) * TILE_TOKENS))
    tokens, starts, lengths, slots = (
        np.asarray(a) for a in (lists.tokens, lists.starts, lists.lengths, slots)
    )
    assert all(a.dtype == np.int32 for a in (tokens, starts, lengths, slots, lists.words))
    assert tokens.shape == (capacity,) and (tokens >= 0).all() and (tokens < m).all()
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


@hypothesis.settings(max_examples=8)  # each compiles a program: the room is a shape
@hypothesis.given(
    blocks=st.sampled_from([1, 6]),
    m=st.sampled_from([1, 257, 700]),
    density=st.sampled_from([0, 0.01, 0.3, 1]),
    seed=st.integers(0, 2**32 - 1),
    excess=st.sampled_from([0, 640]),
)
def test_lists_are_who_uses_what(blocks, m, density, seed, excess):
    counts, used = draw(blocks, m, density, np.random.default_rng(seed))
    capacity = max(64, sum(-(-row.sum() // 64) * 64 for row in used) + excess)
    lists, fits = make(counts, m, int(capacity))
    assert fits
    np.testing.assert_array_equal(check(lists, used, capacity), used.sum(axis=1))


def test_empty_and_full_lists():
    used = np.zeros((4, 512), np.uint8)
    used[[1, 3]] = 64
    lists, fits = make(used, 500, 1024)
    assert fits
    np.testing.assert_array_equal(lists.starts, [0, 0, 512, 512])
    np.testing.assert_array_equal(check(lists, used[:, :500] != 0, 1024), [0, 500, 0, 500])


@pytest.mark.parametrize("capacity", [64, 1024])
def test_lists_without_room_are_cut_off(capacity):
    counts, used = draw(6, 700, 0.5, seeds.rng())
    used[0] = True
    counts[0] = 1
    for m in (1, 700):
        room = sum(-(-row.sum() // 64) * 64 for row in used[:, :m])
        lists, fits = make(counts[:, : -(-m // TILE_TOKENS) * TILE_TOKENS], m, capacity)
        assert fits == (room <= capacity)
        assert check(lists, used[:, :m], capacity).sum() <= capacity


def test_bad_operands_are_named():
    call = functools.partial(neuron_lists, jnp.zeros((2, 256), jnp.uint8))
    for capacity in (0, 100):
        with pytest.raises(ValueError, match=f"positive multiple of 64, got {capacity}"):
            call(200, capacity)
    with pytest.raises(ValueError, match=r"\[H / 64, 512\] for 300 tokens.*\[2, 256\]"):
        call(300, 64)
    with pytest.raises(ValueError, match=r"must be uint8 .*int32"):
        neuron_lists(jnp.zeros((2, 256), jnp.int32), 200, 64)

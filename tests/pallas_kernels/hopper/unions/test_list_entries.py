"""Entries of neuron lists: no store past their end; `test_hidden_grads` has the values."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.tiles import tiled
from pallas_kernels.hopper.unions import list_entries
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, TILE_TOKENS
from tests import seeds

CAPACITY = 80


def scatter(values, lists):
    """Slots in which the values of the second list are stored, with a capacity of CAPACITY."""

    def body(neurons, words, values, entries, place):
        mine = list_entries.load_neurons(neurons)
        list_words = list_entries.load_words(words, mine, jnp.int32(0), values.shape[1] // 32)
        place[...] = array = plgpu.load(values, layout=plgpu.Layout.WGMMA, optimized=False)
        within = [entries.at[pl.ds(0, CAPACITY)]]
        list_entries.scatter(within, mine, list_words, [array], [place])

    kernel = plgpu.kernel(
        body,
        out_type=(),
        scratch_types=[
            plgpu.SMEM(values.shape, values.dtype, transforms=tiled(values.dtype, values.shape[1]))
        ],
        grid=(1,),
        grid_names=("block",),
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    entries = jax.new_ref(jnp.zeros((lists.tokens.size, GROUP_NEURONS), values.dtype))
    neurons = jnp.arange(GROUP_NEURONS, 2 * GROUP_NEURONS, dtype=jnp.int32)
    kernel(neurons, lists.words, values, entries)
    return entries[...]


def draw_for_scatter(tokens):
    """Values of 64 neurons, and lists whose second one goes past slot CAPACITY."""
    values = seeds.rng().standard_normal((GROUP_NEURONS, tokens))
    counts = np.zeros((2, TILE_TOKENS), np.uint8)
    counts[0, :64] = counts[1, :tokens] = 1
    lists, _ = REFERENCE.neuron_lists(counts, 64, 192)
    return jnp.asarray(values, jnp.bfloat16), lists


def test_scatter_lowers_without_a_gpu(lower):
    assert "mosaic_gpu" in lower(scatter, *draw_for_scatter(64))


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [32, 64])
def test_nothing_is_stored_past_the_capacity_on_the_gpu(tokens):
    values, lists = draw_for_scatter(tokens)
    expected = np.zeros((lists.tokens.size, GROUP_NEURONS))
    end = min(64 + tokens, CAPACITY)
    expected[64:end] = np.asarray(values, np.float32).T[: end - 64]
    np.testing.assert_array_equal(jax.jit(scatter)(values, lists).astype(jnp.float32), expected)

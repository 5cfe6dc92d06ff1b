import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, OUTLYING_ABOVE, TILE_TOKENS
from tests.pallas_kernels.planned import planned, pre_activations

pack = jax.jit(tile_union.pack, static_argnums=1)
unpack = jax.jit(tile_union.unpack, static_argnums=2)
to_dense = jax.jit(tile_union.to_dense, static_argnums=2)


@pytest.mark.parametrize(
    ("m", "h", "dtype"),
    [(1, 128, jnp.bfloat16), (256, 384, jnp.float16), (700, 640, jnp.bfloat16)],
)
def test_unpack_restores_the_gate_and_masks_say_who_uses_what(m, h, dtype):
    z = pre_activations(m, h, 0.05)
    z[m // 2] = np.abs(z[m // 2])
    z[m // 2, OUTLYING_ABOVE:GROUP_NEURONS] = -1  # as many as are not outlying
    gate, masks, counts = jax.device_get(pack(z, dtype))
    g = np.maximum(z, 0).astype(dtype)
    np.testing.assert_array_equal(unpack(gate, masks, m), g)
    for r in range(-(-m // TILE_TOKENS)):
        tile = g[TILE_TOKENS * r : TILE_TOKENS * (r + 1)] != 0
        groups = tile.reshape(-1, h // GROUP_NEURONS, GROUP_NEURONS)
        n = groups.sum(axis=2)
        np.testing.assert_array_equal(counts[:, TILE_TOKENS * r :][:, : len(tile)], n.T)
        usual = (groups & (n <= OUTLYING_ABOVE)[:, :, None]).reshape(tile.shape)
        for mask, used in zip(masks, (tile, usual), strict=True):
            bits = [int(mask[r, i // 32]) >> i % 32 & 1 for i in range(h)]
            np.testing.assert_array_equal(bits, used.any(axis=0))


@pytest.mark.parametrize("factors", [1, 2])
def test_to_dense_puts_what_blocks_hold_where_it_belongs(factors):
    m, h = 700, 384
    _, _, plan, _ = planned(pre_activations(m, h, 0.002), np.zeros((m, 128), jnp.bfloat16))
    items = plan.items[::-1]  # tiles may be in any order
    blocks = np.arange(1.0, 1 + (len(items) + 3) * factors * 128 * TILE_TOKENS, dtype=np.float32)
    blocks = blocks.reshape(-1, factors, 128, TILE_TOKENS)
    expected = np.zeros((factors, h, 3, TILE_TOKENS), np.float32)
    for item, block in zip(items, blocks[: len(items)], strict=True):
        tile, first = item // (h // 128), item % (h // 128) * 128
        neurons = plan.neurons[tile, first : min(first + 128, plan.sizes[tile])]
        expected[:, neurons, tile] = block[:, : len(neurons)]
    assert 0 < np.count_nonzero(expected) < expected.size / 2
    spare = np.full(3, items.max() + 1, np.int32)  # past the count there may be anything
    plan = dataclasses.replace(plan, items=np.concatenate([items, spare]))
    dense = to_dense(blocks.reshape(len(blocks), -1, TILE_TOKENS), plan, m)
    np.testing.assert_array_equal(dense, expected.reshape(factors, h, -1)[:, :, :m])

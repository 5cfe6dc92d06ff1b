import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, OUTLYING_ABOVE, TILE_TOKENS
from tests.pallas_kernels.planned import pre_activations

pack = jax.jit(tile_union.pack, static_argnums=1)
unpack = jax.jit(tile_union.unpack, static_argnums=2)


@pytest.mark.parametrize(
    ("m", "h", "dtype"),
    [(1, 128, jnp.bfloat16), (256, 384, jnp.float16), (700, 640, jnp.bfloat16)],
)
def test_unpack_restores_the_gate_and_masks_say_who_uses_what(m, h, dtype):
    z = pre_activations(m, h, 0.05)
    z[m // 2] = np.abs(z[m // 2])
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

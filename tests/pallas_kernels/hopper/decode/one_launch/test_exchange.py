"""Where the words of tokens lie in an exchange."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.decode.one_launch.exchange import as_placed, place_of
from pallas_kernels.hopper.decode.one_launch.products import distances, first_word


@pytest.mark.parametrize(("tokens", "features"), [(8, 64), (24, 576), (32, 2048)])
def test_each_word_has_a_place_of_its_own(tokens, features):
    token, word = np.meshgrid(np.arange(tokens), np.arange(features // 2), indexing="ij")
    places = np.asarray(place_of(token, word, features))
    assert sorted(places.reshape(-1)) == list(range(tokens * features // 2))
    words = jnp.arange(tokens * features // 2, dtype=jnp.int32).reshape(tokens, -1)
    np.testing.assert_array_equal(np.asarray(as_placed(words))[places], words)


def test_what_a_warp_takes_at_once_lies_together(interpreted):
    """Two words of each lane, 512 bytes: of eight tokens eight words."""
    token = np.arange(8).repeat(4)
    with interpreted(sms=2):
        first = [np.asarray(first_word(jnp.int32(wg))).reshape(4, 32) for wg in range(2)]
    for of_warpgroup in first:
        for of_warp in of_warpgroup:
            for distance in distances(2)[::2]:
                pairs = [place_of(token, of_warp + distance + i, 1024) for i in (0, 4)]
                places = np.stack(pairs, 1).reshape(-1)
                np.testing.assert_array_equal(places, places[0] + np.arange(64))

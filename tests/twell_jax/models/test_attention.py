"""What a sliding window leaves of a mask."""

import numpy as np
import pytest

from twell_jax.models.attention import in_window, split_documents


@pytest.mark.parametrize("window", [1, 3, 7])
def test_a_token_attends_to_itself_and_those_just_before(window):
    expected = [[0 <= t - s < window for s in range(7)] for t in range(7)]
    mask = in_window(None, 0, 2, 7, window)
    if window == 7:  # all of them
        assert mask is None
    else:
        assert mask.shape == (2, 1, 7, 7)
        np.testing.assert_array_equal(mask[1, 0], expected)
    # The last four of the seven, as they come after three in a cache with room for nine.
    stored = np.arange(9) <= np.arange(3, 7)[:, None]
    cached = in_window(np.stack([stored[None], stored[None]]), 3, 2, 4, window)
    np.testing.assert_array_equal(cached[0, 0, :, :7], expected[3:])
    assert not np.any(cached[..., 7:])


def test_a_window_ends_where_a_document_does():
    _, mask = split_documents(np.array([[5, 9, 5, 5, 5]]), document_end=9)
    found = in_window(mask, 0, 1, 5, 2)
    expected = ["10000", "11000", "00100", "00110", "00011"]
    np.testing.assert_array_equal(found[0, 0], [[int(bit) for bit in row] for row in expected])

"""Windows by number, and the pieces of row tiles, for any offset of the grid."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from twell_jax.ffn.union_lasso import TokenWindows, WindowGrid, sums_of_tokens


@functools.partial(jax.jit, static_argnums=(0, 2))
def windows_and_pieces(grid, offset, m):
    windows = TokenWindows.of(grid, offset, m)
    return windows, windows.pieces()


def test_tokens_of_no_window_may_hold_anything():
    h = jnp.array([[1.0, 2.0], [np.nan, np.inf], [3.0, 4.0]])
    sums = sums_of_tokens(h, jnp.array([0, 2, 1]), 2)
    np.testing.assert_array_equal(sums, [[1, 4], [9, 16]])


@settings(max_examples=15)  # each compiles a program
@given(
    sequence=st.sampled_from([1, 3, 100, 256, 700]),
    length=st.sampled_from([1, 32, 256, 1000]),
    count=st.sampled_from([1, 4]),
    data=st.data(),
)
def test_a_window_is_a_run_of_a_sequence_between_lines_of_the_grid(sequence, length, count, data):
    offset, grid = data.draw(st.integers(0, length - 1)), WindowGrid(sequence, length)
    m = count * sequence
    windows, (piece, window) = jax.device_get(windows_and_pieces(grid, jnp.int32(offset), m))
    token = np.arange(m)
    begins = (token % sequence == 0) | ((token % sequence + offset) % length == 0)
    runs = np.cumsum(begins)
    changes = np.diff(windows.of_token, prepend=-1) > 0
    np.testing.assert_array_equal(changes, begins)  # one window after the other, none twice
    sizes = np.bincount(windows.of_token, minlength=len(windows.sizes))
    np.testing.assert_array_equal(windows.sizes, sizes)
    assert np.count_nonzero(windows.sizes) == runs[-1]
    # Each token finds its window by its piece, and the rest of the last tile none.
    found = np.take_along_axis(window, piece, axis=1).reshape(-1)
    np.testing.assert_array_equal(found[:m], windows.of_token)
    assert (found[m:] == len(windows.sizes)).all()

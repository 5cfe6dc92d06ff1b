"""The whole block of few tokens: operands, and what results must be."""

import functools

import jax
import numpy as np

from tests import seeds
from tests.errors import ROUNDING, relative_error


def draw(m, d, h, active, dtype):
    """x, w_gate, w_up and w_down, of NumPy. The last column of x is 1, and that of w_gate makes
    about a share `active` of the neurons active."""
    normal = functools.partial(seeds.rng().standard_normal, dtype=np.float32)
    x, w_gate, w_up, w_down = normal((m, d)), normal((h, d)), normal((h, d)), normal((h, d))
    x[:, -1] = 1
    w_gate /= d**0.5
    w_gate[:, -1] = np.quantile(normal(10000), active)
    return [a.astype(dtype) for a in (x, w_gate, w_up / d**0.5, w_down)]


def dense(x, w_gate, w_up, w_down):
    """(y, l1) in float64 on the host, from the gate as rounded to the dtype of x."""
    dtype = x.dtype
    x, w_up, w_down = (np.asarray(a, np.float64) for a in (x, w_up, w_down))
    first = w_up if w_gate is None else np.asarray(w_gate, np.float64)
    h = np.maximum((x @ first.T).astype(dtype).astype(np.float64), 0)
    if w_gate is not None:
        h = h * (x @ w_up.T)
    return h @ w_down, np.sum(np.abs(h), axis=1)


def assert_matches(out, x, w_gate, w_up, w_down):
    y, nnz, l1, fired = jax.device_get(out)
    y_ref, l1_ref = dense(x, w_gate, w_up, w_down)
    assert y.dtype == x.dtype and y.shape == y_ref.shape
    assert relative_error(y, y_ref) < 2 * ROUNDING  # of the gate and of y
    assert relative_error(l1, l1_ref) < ROUNDING
    # A gate within rounding of zero may go either way.
    first = w_up if w_gate is None else w_gate
    gate = np.asarray(x, np.float64) @ np.asarray(first, np.float64).T
    assert np.all(np.sum(gate > 1e-5, axis=1) <= nnz)
    assert np.all(nnz <= np.sum(gate > -1e-5, axis=1))
    assert np.all((gate > 1e-5).any(axis=0) <= fired)
    assert np.all(fired <= (gate > -1e-5).any(axis=0))

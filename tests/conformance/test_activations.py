"""Activations other than ReLU by every back end and algorithm, against float64 by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import seeds
from tests.conformance.cases import ALGORITHMS, by, draw, gradients
from tests.errors import ROUNDING, relative_error
from twell_jax import Rectifier, sparse_ffn
from twell_jax.ffn import dispatch

THRESHOLD = 0.7  # no number of 16 bits
CASES = {  # activation, whether there is a gate
    "relu2": ("relu2", True),
    "relu2-plain": ("relu2", False),
    "fatrelu": ("fatrelu", True),
    "fatrelu-plain": ("fatrelu", False),
    "drelu": ("drelu", True),
}
every_case = pytest.mark.parametrize("case", CASES)
gpu = pytest.mark.gpu


def options(case):
    activation, _ = CASES[case]
    is_named = activation != "fatrelu"
    return {"activation": activation if is_named else Rectifier(threshold=THRESHOLD)}


def operands_of(case, m, d, h, **change):
    return draw(m, d, h, gated=CASES[case][1], **{"threshold": 1.5} | change)


@functools.cache
def forward(back_ends, algorithm, case):
    """No program is traced twice."""
    return jax.jit(by(algorithm, **options(case)))


@functools.cache
def backward(back_ends, case, capacity):
    ffn = functools.partial(sparse_ffn, **options(case), gradients=capacity)
    return jax.jit(functools.partial(gradients, ffn))


def on_poisoned_memory(call, *operands):
    """What `call` returns on memory that held NaN just before."""
    jax.block_until_ready(jnp.full(1 << 24, jnp.nan)).delete()
    return jax.device_get(call(*operands))


def by_hand(case, x, w_gate, w_up, w_down, dy=None):
    """(y, g, |h| summed, gradients of sum(y dy) + l1) in float64; z is rounded to the dtype of x,
    as it must be before it meets a threshold."""
    activation, gated = CASES[case]
    dtype = x.dtype
    x, w_up, w_down = (a.astype(np.float64) for a in (x, w_up, w_down))
    w_gate = w_gate.astype(np.float64) if gated else w_up
    z, u = (x @ w_gate.T).astype(dtype).astype(np.float64), x @ w_up.T
    kept = z > (THRESHOLD if activation == "fatrelu" else 0)
    g, slope = np.where(kept, z, 0), kept.astype(float)
    if activation == "relu2":
        g, slope = g * g, 2 * g
    passes = np.where(u > 0, 1, 0) if activation == "drelu" else 1
    h = g * u * passes if gated else g
    y, l1 = h @ w_down, np.abs(h).sum(axis=1)
    if dy is None:
        return y, g, l1, None
    dh = dy @ w_down.T + np.sign(h) / len(x)
    dz = dh * slope * (u * passes if gated else 1)
    du = dh * g * passes
    dx = dz @ w_gate + (du @ w_up if gated else 0)
    d_weights = [dz.T @ x, du.T @ x] if gated else [None, dz.T @ x]
    return y, g, l1, [dx, *d_weights, h.T @ dy]


def assert_exact(case, operands, y, stats):
    y_ref, g, l1, _ = by_hand(case, *operands)
    assert y.dtype == operands[0].dtype
    assert relative_error(y, y_ref) < 2.5 * ROUNDING  # of the gate, of its square, of h and y
    np.testing.assert_allclose(stats.l1, l1.mean(), rtol=1e-2)
    # A sum in another order may fall on the other side of the threshold.
    nnz = np.sum(g.astype(y.dtype) != 0, axis=1)
    np.testing.assert_allclose(stats.nnz, nnz.mean(), rtol=1e-3)
    assert abs(int(stats.max_nnz) - nnz.max()) <= 2
    assert np.mean(stats.fired == (g != 0).any(axis=0)) > 0.99


@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        *((algorithm, case) for algorithm in ("few_tokens", "twell") for case in CASES),
        *(("unions", case) for case in CASES if not CASES[case][1]),  # gated: with their gradients
    ],
)
def test_sparse_dense_and_silent_rows(back_end, algorithm, case):
    call = forward(dispatch.BACK_ENDS, algorithm, case)
    operands = operands_of(case, ALGORITHMS[algorithm][1], 192, 640)
    for last_feature in (1, 0, -3):  # few neurons fire, about half, nearly all
        operands[0][:, -1] = last_feature
        operands[0][:2, -1] = -3, 1000  # the first token fires nearly all, the second none
        assert_exact(case, operands, *on_poisoned_memory(call, *operands))
    operands[0][:, -1] = 1000
    y, stats = on_poisoned_memory(call, *operands)
    assert not np.any(y) and stats.nnz == stats.l1 == 0 and not np.any(stats.fired)
    operands[0][1, 5] = np.nan
    y, stats = on_poisoned_memory(call, *operands)
    np.testing.assert_array_equal(np.isnan(y).all(axis=1), np.arange(len(y)) == 1)
    assert np.isnan(stats.l1) and not np.any(np.delete(y, 1, axis=0))


@gpu
@every_case
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("algorithm", "m", "d", "h"),
    [
        ("few_tokens", 1, 2048, 5632),
        ("few_tokens", 33, 128, 1408),
        ("twell", 65, 512, 1408),
        ("twell", 1000, 192, 384),
        ("unions", 257, 512, 1408),
        ("unions", 1001, 2048, 5632),
    ],
)
def test_shapes_and_dtypes_on_the_gpu(case, dtype, algorithm, m, d, h):
    call = forward(dispatch.BACK_ENDS, algorithm, case)
    for shift in (2.2, 0, -9):
        operands = operands_of(case, m, d, h, dtype=dtype, threshold=shift)
        assert_exact(case, operands, *on_poisoned_memory(call, *operands))


def assert_exact_gradients(case, operands, capacity=1.0, overflow=0):
    call = backward(dispatch.BACK_ENDS, case, capacity)
    dy = seeds.rng().standard_normal(operands[0].shape).astype(operands[0].dtype)
    grads, (y, stats) = on_poisoned_memory(call, operands, dy.astype(np.float32))
    assert stats.overflow == overflow
    assert_exact(case, operands, y, stats)
    *_, expected = by_hand(case, *operands, dy=dy.astype(np.float64))
    for ours, ref in zip(grads, expected, strict=True):
        assert (ours is None) == (ref is None)
        if ref is not None:
            assert ours.dtype == dy.dtype
            # Of the gate and its root, of h, of a factor's gradient, of the result.
            assert relative_error(ours, ref) < 3 * ROUNDING


@pytest.mark.parametrize("case", ["drelu", "relu2-plain"])  # all on a GPU
def test_sparse_gradients(back_end, case):
    for shift, last_feature in ((1.5, -3), (1000, 1), (-9, 1)):  # mixed, all zero, all dense
        operands = operands_of(case, 600, 128, 256, threshold=shift)
        operands[0][3::100, -1] = last_feature
        assert_exact_gradients(case, operands)
    assert_exact_gradients(case, operands, capacity=0.5, overflow=1)  # computed densely


@gpu
@every_case
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("m", "every", "shift"), [(600, 100, 2.2), (1001, 50, 1.5), (300, 1000, 9), (300, 1000, -9)]
)
def test_sparse_gradients_on_the_gpu(case, dtype, m, every, shift):
    operands = operands_of(case, m, 512, 1408, dtype=dtype, threshold=shift)
    operands[0][3::every, -1] = -1
    assert_exact_gradients(case, operands)


@every_case
def test_lowers_for_an_h100(lower, case):
    operands = operands_of(case, 5, 128, 256)
    text = lower(by("few_tokens", **options(case)), *operands)
    assert "token_gate" in text and "token_ffn" in text
    assert text != lower(by("few_tokens"), *operands)

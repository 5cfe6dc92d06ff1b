"""Activations other than ReLU by every back end and algorithm, against float64 by hand."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import seeds
from tests.conformance.activations import CASES, by_hand, options
from tests.conformance.cases import ALGORITHMS, by, draw, gradients, sparse
from tests.errors import ROUNDING, relative_error
from tests.poisoned import poison
from twell_jax import sparse_ffn
from twell_jax.ffn import dispatch

every_case = pytest.mark.parametrize("case", CASES)
gpu = pytest.mark.gpu


def operands_of(case, m, d, h, **change):
    return draw(m, d, h, gated=CASES[case][1], **{"threshold": 1.5} | change)


@functools.cache
def forward(back_ends, algorithm, case):
    """No program is traced twice."""
    return jax.jit(by(algorithm, **options(case)))


@functools.cache
def backward(back_ends, case, capacity):
    ffn = functools.partial(sparse_ffn, **sparse(capacity), **options(case))
    return jax.jit(functools.partial(gradients, ffn))


def on_poisoned_memory(call, *operands):
    """What `call` returns on memory that held NaN just before."""
    poison()
    return jax.device_get(call(*operands))


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


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("algorithm", "case"),
    [
        *(("few_tokens", case) for case in CASES),
        ("twell", "drelu"),
        ("unions", "fatrelu-plain"),
        *(pytest.param("twell", case, marks=pytest.mark.slow) for case in CASES if case != "drelu"),
        # Gated ones: with their gradients.
        pytest.param("unions", "relu2-plain", marks=pytest.mark.slow),
    ],
)
def test_sparse_dense_and_silent_rows(back_end, algorithm, case):
    call = forward(dispatch.BACK_ENDS, algorithm, case)
    operands = operands_of(case, ALGORITHMS[algorithm][1], 192, 640)
    for last_feature in (1, 0, -3):  # few neurons are active, about half, nearly all
        operands[0][:, -1] = last_feature
        operands[0][:2, -1] = -3, 1000  # nearly all for the first token, none for the second
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


@pytest.mark.parametrize(  # all on a GPU
    "case", ["drelu", pytest.param("relu2-plain", marks=pytest.mark.slow)]
)
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


@pytest.mark.sampled(1)
@every_case
def test_lowers_for_an_h100_in_as_many_kernels_as_relu(lower, case):
    operands = operands_of(case, 5, 128, 256)
    ours, relu = (lower(by("few_tokens", **o), *operands) for o in (options(case), {}))
    assert ours.count("@mosaic_gpu") == relu.count("@mosaic_gpu") > 0 and ours != relu

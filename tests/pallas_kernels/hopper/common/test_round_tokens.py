"""Tokens in 8 bits, to the bit, against NumPy and ml_dtypes."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.hopper.common.round_tokens import round_tokens
from pallas_kernels.kernels import REFERENCE
from tests import seeds

DTYPES = [jnp.bfloat16, jnp.float16]


def reference(x):
    """On a CPU, where reciprocals are exact; those of XLA's on GPUs are not."""
    with jax.default_device(jax.devices("cpu")[0]):
        return jax.jit(REFERENCE.round_tokens)(x)


ROUNDERS = [
    pytest.param(reference, id="reference"),
    pytest.param(jax.jit(round_tokens), marks=pytest.mark.gpu, id="round_tokens"),
]


def by_numpy(x):
    """The bytes of the values, and the scales."""
    x = np.asarray(x, np.float32)
    largest = np.abs(x).max(axis=1, keepdims=True)
    scale = np.maximum(largest * np.float32(1 / 448), np.finfo(np.float32).tiny)
    scale = np.where(largest > 0, scale, np.float32(1))
    values = (x * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn)
    return values.view(np.uint8), scale


@pytest.mark.parametrize("rounder", ROUNDERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "d"), [(1, 8), (7, 128), (35, 200), pytest.param(1001, 8192, marks=pytest.mark.gpu)]
)
def test_every_bit(m, d, dtype, rounder):
    rng = seeds.rng()
    largest = float(jnp.finfo(dtype).max) / 8
    x = rng.standard_normal((m, d)) * 2.0 ** rng.integers(-20, 12, (m, 1))
    x *= 2.0 ** rng.integers(-12, 1, (m, d))  # the smallest round to 0 and to subnormal values
    x = np.clip(x, -largest, largest).astype(dtype)
    if m > 6:
        x[2], x[5] = 0, -0.0
        x[3, 1:], x[3, 0] = 0, jnp.finfo(dtype).tiny
        x[4, -1] = jnp.finfo(dtype).max
    values, scale = by_numpy(x)
    found = jax.device_get(rounder(x))
    np.testing.assert_array_equal(found.scale, scale)
    np.testing.assert_array_equal(found.values.view(np.uint8), values)


@pytest.mark.parametrize("rounder", ROUNDERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_that_is_not_finite_becomes_nan_and_others_stay(dtype, rounder):
    x = seeds.rng().standard_normal((10, 256)).astype(dtype)
    x[1, 3], x[4, 255], x[6, 0] = np.nan, np.inf, -np.inf
    found = jax.device_get(rounder(x))
    is_nan = np.isin(np.arange(10), [1, 4, 6])
    np.testing.assert_array_equal(np.isnan(found.scale[:, 0]), is_nan)
    np.testing.assert_array_equal(np.isnan(found.values.astype(np.float32)).all(axis=1), is_nan)
    kept = x[~is_nan]
    np.testing.assert_array_equal(found.values[~is_nan].view(np.uint8), by_numpy(kept)[0])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d"), [(1, 8), (1001, 2048), (3, 8192)])
def test_lowers_without_a_gpu(lower, m, d, dtype):
    text = lower(round_tokens, jax.ShapeDtypeStruct((m, d), dtype))
    assert "mosaic_gpu" in text and "cvt.rn.satfinite.e4m3x2.f32" in text


def test_bad_operands_are_named():
    for x in (
        jnp.zeros((4, 12), jnp.bfloat16),
        jnp.zeros((4, 16)),
        jnp.zeros((0, 16), jnp.float16),
    ):
        with pytest.raises(ValueError, match=r"x must be a bfloat16 or float16 \[M, D\].*got"):
            round_tokens(x)

"""Products of 8-bit operands for training, against float64 of operands rounded by NumPy."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from tests import seeds
from tests.errors import ROUNDING, relative_error
from twell_jax.ffn import float8

# For cuBLASLt; Triton would be tried as well, and takes long.
OPTIONS = {"xla_gpu_enable_triton_gemm": False}

E4M3, E5M2 = ml_dtypes.float8_e4m3fn, ml_dtypes.float8_e5m2


def rounded(a, dtype):
    """The numbers that an array becomes, float64."""
    a = np.asarray(a, np.float64)
    _, exponent = np.frexp(np.abs(a).max() / float(ml_dtypes.finfo(dtype).max))
    return (a / 2.0**exponent).astype(np.float32).astype(dtype).astype(np.float64) * 2.0**exponent


def draw(scale=1.0):
    """x, whose tokens have other sizes, two kernels, and gradients of the two products."""
    shapes = (3, 48, 1), (3, 48, 64), (64, 96), (64, 32), (3, 48, 96), (3, 48, 32)
    sizes, x, *others = (seeds.rng().standard_normal(shape) for shape in shapes)
    factors = 2.0**-3, 2.0**-3, 2.0**-20, 2.0**-10
    scaled = scale * sizes * x, *(a * factor for a, factor in zip(others, factors, strict=True))
    x, first, second, *grads = (jnp.asarray(a, jnp.bfloat16) for a in scaled)
    return x, [first, second], grads


@pytest.mark.parametrize("scale", [1.0, 1e-30, 1e30])
def test_products_and_gradients_are_those_of_rounded_operands(scale):
    x, kernels, grads = draw(scale)
    ys, gradients = jax.vjp(float8.products, x, kernels)
    of_x, of_kernels = gradients(grads)
    rows, matrix = (rounded(a, E4M3) for a in (x.reshape(-1, 64), jnp.concatenate(kernels, axis=1)))
    of_ys = rounded(jnp.concatenate(grads, axis=-1).reshape(-1, 128), E5M2)
    joined = np.concatenate(ys, axis=-1).reshape(-1, 128)
    for found, expected in (
        (joined, rows @ matrix),
        (of_x.reshape(-1, 64), of_ys @ matrix.T),
        (np.concatenate(of_kernels, axis=1), rows.T @ of_ys),
    ):
        assert found.dtype == np.dtype(jnp.bfloat16)
        assert relative_error(found, expected) <= ROUNDING


def test_what_is_zero_or_tiny_stays_and_what_is_not_finite_spreads():
    x, kernels, grads = draw()
    for y in float8.products(jnp.zeros_like(x), kernels):
        np.testing.assert_array_equal(y, 0)
    for tiny in (1e-38, 1e-45):
        assert all(np.isfinite(y).all() for y in float8.products(jnp.full_like(x, tiny), kernels))
    x = x.at[1, 2, 3].set(0) * 2.0**12  # too large for 8 bits without a scale
    expected = float8.products(x, kernels)
    for bad in (np.nan, np.inf):
        ys, gradients = jax.vjp(float8.products, x.at[1, 2, 3].set(bad), kernels)
        for y, of_zero in zip(ys, expected, strict=True):
            assert np.isnan(y[1, 2]).all()
            np.testing.assert_array_equal(y.at[1, 2].set(0), of_zero.at[1, 2].set(0))
        assert all(np.isnan(g[3]).any() for g in gradients(grads)[1])


@pytest.mark.gpu
def test_cublas_multiplies_8_bits_in_both_passes():
    x, kernels, _ = draw()

    def loss(x, kernels):
        return sum(jnp.sum(y.astype(jnp.float32) ** 2) for y in float8.products(x, kernels))

    compiled = jax.jit(jax.grad(loss, (0, 1))).lower(x, kernels).compile(OPTIONS)
    assert compiled.as_text().count('custom_call_target="__cublas$lt$matmul$f8"') == 3

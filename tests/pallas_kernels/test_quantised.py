"""8-bit floats against NumPy and ml_dtypes, which share no code with them."""

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from pallas_kernels.quantised import Quantised, product, quantise, rounded
from tests import seeds
from tests.errors import relative_error

multiply = jax.jit(product, static_argnums=2)


def drawn(*shape):
    """Numbers whose rows and columns have very different sizes, a row and a column zero."""
    rng = seeds.rng()
    a = rng.standard_normal(shape) * 4.0 ** rng.integers(-9, 9, shape[:-1])[..., None]
    a *= 2.0 ** rng.integers(-4, 4, shape[-1])
    a[..., 1, :] = 0
    a[..., 2] = 0
    return a.astype(np.float32)


def by_numpy(a, axis):
    """The values and scales of `a` in float64."""
    largest = np.abs(a).max(axis, keepdims=True)
    scale = np.where(largest > 0, largest * np.float32(1 / 448), np.float32(1))
    values = (a * (np.float32(1) / scale)).astype(ml_dtypes.float8_e4m3fn)
    return values.astype(np.float64), scale.astype(np.float64)


@pytest.mark.parametrize("axis", [-1, -2])
@pytest.mark.parametrize(
    ("shape", "dtype"), [((7, 5), "float32"), ((3, 40, 33), "bfloat16"), ((7, 5), "float16")]
)
def test_values_are_rounded_to_the_nearest(shape, axis, dtype):
    a = (drawn(*shape) / 1e4).astype(jnp.dtype(dtype))
    found = quantise(a, axis)
    a = a.astype(np.float32)
    values, scale = by_numpy(a, axis)
    np.testing.assert_array_equal(np.asarray(found.values, np.float64), values)
    np.testing.assert_array_equal(np.asarray(found.scale, np.float64), scale)
    assert found.shape == found.values.shape == a.shape and len(found) == len(a)
    error = np.abs(values * scale - a)
    assert np.all(error <= np.maximum(np.abs(a) / 16, scale * 2.0**-10) * (1 + 1e-6))


def test_rows_at_the_ends_of_the_range_stay_finite():
    largest, tiny = np.finfo(np.float32).max, np.finfo(np.float32).tiny
    rows = np.array([[largest, -largest], [tiny, -tiny], [288 * tiny, 0], [0, 0]], np.float32)
    found = quantise(rows)
    again = np.asarray(found.values, np.float64) * np.asarray(found.scale, np.float64)
    np.testing.assert_allclose(again, rows.astype(np.float64), rtol=1e-6)
    assert found.scale[3] == 1 and np.all(found.scale >= tiny)


def test_weights_that_cannot_be_held_are_refused():
    a = drawn(6, 8)
    a[4, 3] = np.inf
    a[2, :2] = np.nan
    with pytest.raises(ValueError, match="3 elements that are inf or NaN"):
        quantise(a)
    with pytest.raises(
        ValueError, match=r"floats and axis -1 or -2 are needed, got int32 \[2, 3\]"
    ):
        quantise(np.ones((2, 3), np.int32))
    with pytest.raises(ValueError, match=r"got float32 \[3\] and axis -1"):
        quantise(np.ones(3, np.float32))
    with pytest.raises(ValueError, match="and axis 0"):
        quantise(a, axis=0)


@pytest.mark.parametrize(
    ("axis", "lead", "dtype"),
    [(-1, (9,), "float32"), (-2, (9,), "bfloat16"), (-1, (2, 4), "bfloat16"), (-2, (), "float32")],
)
def test_products_are_those_of_the_quantised_operands(axis, lead, dtype):
    k, n = 530, 24
    x = jnp.asarray(drawn(4, *lead, k)[3], dtype)
    w = drawn(n, k) if axis == -1 else drawn(k, n)
    found = multiply(x, quantise(w, axis), axis)
    x_values, x_scale = by_numpy(np.asarray(x, np.float32), -1)
    w_values, w_scale = by_numpy(w, axis)
    exact = (x_values * x_scale) @ (w_values * w_scale if axis == -2 else (w_values * w_scale).T)
    assert found.dtype == dtype and found.shape == (*lead, n)
    assert relative_error(found, exact) < (2e-6 if dtype == "float32" else 2**-8)


def test_sums_are_kept_in_float32():
    """A large term first and many small ones: with fewer bits than float32 has, these vanish."""
    x = np.ones((1, 4096), np.float32)
    w = np.full((1, 4096), 2.0**-9, np.float32)
    w[0, 0] = 448  # its scale is 1
    assert multiply(x, quantise(w), -1)[0, 0] == pytest.approx(448 + 4095 / 512, rel=1e-6)


def test_a_row_with_an_inf_or_a_nan_becomes_nan_and_others_stay():
    x = drawn(5, 16)
    x[0, 3], x[3, 1] = np.nan, -np.inf
    w = quantise(drawn(8, 16))
    found = np.asarray(multiply(x, w, -1))
    assert np.all(np.isnan(found[[0, 3]])) and np.all(np.isfinite(found[[1, 2, 4]]))


def test_gradients_are_refused_in_one_line():
    x, w = jnp.asarray(drawn(4, 16)), quantise(drawn(8, 16))
    for function, argument in (
        (lambda x: product(x, w, -1).sum(), x),
        (lambda scale: product(x, Quantised(w.values, scale), -1).sum(), w.scale),
    ):
        with pytest.raises(ValueError, match="Quantised weights has no gradients; train arrays"):
            jax.grad(function)(argument)


def test_it_is_a_tree_of_two_arrays():
    w = quantise(drawn(8, 16))
    doubled = jax.jit(lambda w: jax.tree.map(lambda a: a + a, w))(w)
    assert isinstance(doubled, Quantised)
    np.testing.assert_array_equal(doubled.scale, 2 * w.scale)
    np.testing.assert_array_equal(rounded(doubled.scale).scale.shape, (8, 1))

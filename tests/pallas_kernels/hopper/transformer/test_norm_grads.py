"""The gradients of an RMSNorm and its residual, against float64."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.transformer.norm_grads import norm_grads
from tests import seeds
from tests.back_ends import BACK_ENDS
from tests.errors import ROUNDING, relative_error

EPS = 1e-5
DTYPES = [jnp.bfloat16, jnp.float16]


def draw(m, d, dtype):
    """x, both gradients and the scale; rows of very different sizes, of zeros, of one number."""
    rng = seeds.rng()
    x, of_normed, of_x = rng.standard_normal((3, m, d))
    x *= 2.0 ** rng.integers(-8, 8, (m, 1))
    x[3::5], of_normed[4::5], of_x[4::7] = 0, 0, 0
    x[2::5, 1:] = 0
    scale = jnp.asarray(rng.standard_normal(d), jnp.float32)
    return *(jnp.asarray(a, dtype) for a in (x, of_normed, of_x)), scale


def assert_matches(found, x, of_normed, of_x, scale):
    x, of_normed, of_x, scale = (np.asarray(a, np.float64) for a in (x, of_normed, of_x, scale))
    root = 1 / np.sqrt(np.mean(x * x, axis=1, keepdims=True) + EPS)
    normed, scaled = x * root, of_normed * scale
    along = np.mean(scaled * normed, axis=1, keepdims=True)
    dx, of_scale = found
    expected = of_x + root * (scaled - normed * along)
    assert relative_error(dx, expected) < ROUNDING
    assert max(map(relative_error, np.asarray(dx), expected)) < ROUNDING  # of each row
    terms = of_normed * normed
    bound = 1e-6 * np.abs(terms).sum(axis=0) + 1e-30
    assert (np.abs(np.asarray(of_scale) - terms.sum(axis=0)) < bound).all()


@pytest.mark.sampled(4)
@pytest.mark.parametrize("kernels", BACK_ENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("m", "d"), [(1, 8), (7, 128), (70, 896), (1001, 2048), (3000, 4096), (501, 8192)]
)
def test_against_float64(m, d, dtype, kernels):
    operands = draw(m, d, dtype)
    assert_matches(jax.jit(partial(kernels.norm_grads, eps=EPS))(*operands), *operands)


@pytest.mark.parametrize(("m", "d"), [(1, 8), (9, 128), (20, 1032)])
def test_in_the_interpreter(m, d, interpreted):
    operands = draw(m, d, jnp.bfloat16)
    with interpreted(sms=2):
        assert_matches(norm_grads(*operands, eps=EPS), *operands)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d"), [(1, 8), (1001, 896), (16384, 2048), (3, 8192)])
def test_lowers_without_a_gpu(lower, m, d, dtype):
    rows, scale = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((d,), jnp.float32)
    assert "mosaic_gpu" in lower(partial(norm_grads, eps=EPS), rows, rows, rows, scale)


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({0: jnp.zeros((4, 12), jnp.bfloat16)}, r"x must be .* D a multiple of 8 up to 8192, got"),
        ({0: jnp.zeros((4, 16))}, r"x must be a bfloat16 or float16 \[M, D\].*float32 \[4, 16\]"),
        ({1: jnp.zeros((4, 16), jnp.float16)}, r"of_normed must be bfloat16 \[4, 16\]"),
        ({2: jnp.zeros((3, 16), jnp.bfloat16)}, r"of_x must be bfloat16 \[4, 16\].*\[3, 16\]"),
        ({3: jnp.zeros(16, jnp.bfloat16)}, r"scale must be float32 \[16\].*bfloat16"),
    ],
)
def test_bad_operands_are_named(changed, message):
    operands = dict(enumerate(draw(4, 16, jnp.bfloat16)))
    with pytest.raises(ValueError, match=message):
        norm_grads(*(operands | changed).values(), eps=EPS)

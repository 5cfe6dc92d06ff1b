"""Transposed matrices, to the bit."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.transformer.transposed import transposed
from tests import seeds
from tests.back_ends import BACK_ENDS

SHAPES = [(64, 128), (8, 8), (72, 264), (136, 120)]
GPU = [pytest.param(shape, marks=pytest.mark.gpu) for shape in ((5632, 2048), (2048, 5640))]


@pytest.mark.parametrize("kernels", BACK_ENDS)
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("shape", [*SHAPES, *GPU])
def test_every_bit_has_its_place(kernels, shape, dtype):
    bits = seeds.rng().integers(0, 2**16, shape, np.uint16)  # NaN of every kind among them
    matrix = jax.lax.bitcast_convert_type(jnp.asarray(bits), dtype)
    found = jax.lax.bitcast_convert_type(jax.jit(kernels.transposed)(matrix), jnp.uint16)
    np.testing.assert_array_equal(found, bits.T)


@pytest.mark.parametrize("shape", [*SHAPES, (5632, 2048)])
def test_lowers_without_a_gpu(lower, shape):
    text = lower(transposed, jax.ShapeDtypeStruct(shape, jnp.bfloat16))
    assert "mosaic_gpu" in text and text.count("prmt.b32") > 0


@pytest.mark.parametrize(
    ("shape", "dtype", "got"),
    [
        ((60, 64), jnp.bfloat16, r"got bfloat16 \[60, 64\]"),
        ((64, 60), jnp.float16, r"got float16 \[64, 60\]"),
        ((64, 64), jnp.float32, r"got float32 \[64, 64\]"),
        ((0, 64), jnp.bfloat16, r"got bfloat16 \[0, 64\]"),
        ((2**15, 2**15), jnp.bfloat16, r"less than 2\^31 bytes, got bfloat16 \[32768, 32768\]"),
        ((64,), jnp.bfloat16, r"got bfloat16 \[64\]"),
    ],
)
def test_other_matrices_are_named(shape, dtype, got):
    with pytest.raises(ValueError, match=f"must be bfloat16 or float16 .*{got}"):
        jax.eval_shape(transposed, jax.ShapeDtypeStruct(shape, dtype))

"""Norms, against float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import ROUNDING, relative_error
from twell_jax.config import ModelConfig
from twell_jax.models.layers import norm


def norm_of(width, dtype):
    shape = {"vocab_size": 61, "context": 16, "d_model": width, "layers": 1, "heads": 4, "d_ff": 48}
    return norm(ModelConfig(**shape, dtype=dtype, norm_eps=1e-5), nnx.Rngs(0))


@pytest.mark.parametrize("size", [1e-3, 1.0, 1e15])
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rms_norm(dtype, size):
    module, rng = norm_of(32, dtype), seeds.rng()
    x = (size * rng.standard_normal((3, 5, 32))).astype(dtype)
    module.scale[...] = scale = jnp.asarray(rng.standard_normal(32), jnp.float32)
    y = jax.jit(lambda x: module(x))(x)
    x, scale = (np.asarray(a, np.float64) for a in (x, scale))
    expected = x / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + 1e-5) * scale
    assert y.dtype == dtype
    assert relative_error(y, expected) < (ROUNDING if dtype == "bfloat16" else 1e-6)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rms_norm_is_one_kernel_on_the_gpu(dtype):
    module = norm_of(2048, dtype)
    x = jax.ShapeDtypeStruct((8, 512, 2048), dtype)
    text = jax.jit(lambda x: module(x)).lower(x).compile().as_text()
    assert text[text.index("ENTRY") :].count(" fusion(") == 1

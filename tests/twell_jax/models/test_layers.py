"""Norms, against float64, and rotary positions."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from pallas_kernels.kernels import REFERENCE
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.twell_jax.drawn import SMALL
from twell_jax.config import ModelConfig
from twell_jax.models import sharding
from twell_jax.models.layers import branch, longest, norm
from twell_jax.models.rope import rope_table, rotate


def norm_of(width, dtype, kind="rms"):
    settings = SMALL | {"d_model": width, "dtype": dtype, "norm_eps": 1e-5, "norm": kind}
    return norm(ModelConfig(**settings), nnx.Rngs(0))


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


@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_no_token_is_longer_after_a_norm(kind):
    module, rng = norm_of(32, "float32", kind), seeds.rng()
    module.scale[...] = jnp.asarray(rng.standard_normal(32), jnp.float32)
    largest = np.argmax(np.abs(module.scale[...]))
    if kind == "layer":
        module.bias[...] = jnp.asarray(rng.standard_normal(32), jnp.float32)
    tokens = np.concatenate([1e3 * np.eye(32)[[largest]], rng.standard_normal((99, 32))])
    lengths = np.linalg.norm(module(jnp.asarray(tokens, jnp.float32)), axis=1)
    assert lengths.max() <= longest(module) * (1 + 1e-6)
    if kind == "rms":
        assert lengths[0] == pytest.approx(float(longest(module)), rel=1e-5)


def test_rotary_scores_depend_on_distance_only():
    config = ModelConfig(**SMALL)
    q, k = seeds.rng().normal(size=(2, 1, 1, 4, 8)).astype(np.float32)

    def score(i, j):
        q_i, k_j = rotate(jnp.concatenate([q, k]), rope_table(jnp.array([[i], [j]]), config))
        return np.einsum("thd,thd->h", q_i, k_j)

    np.testing.assert_allclose(score(0, 0), np.einsum("bthd,bthd->h", q, k), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(score(107, 104), score(3, 0), rtol=1e-3, atol=1e-4)
    assert np.abs(score(4, 0) - score(3, 0)).min() > 1e-4


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_rms_norm_is_one_kernel_on_the_gpu(dtype):
    module = norm_of(2048, dtype)
    x = jax.ShapeDtypeStruct((8, 512, 2048), dtype)
    text = jax.jit(lambda x: module(x)).lower(x).compile().as_text()
    assert text[text.index("ENTRY") :].count(" fusion(") == 1


MESHES = {"one device": ((1, 1), 1), "eight": ((4, 2), 8), "a batch that none splits": ((3, 1), 3)}


@pytest.mark.parametrize("case", MESHES)
@pytest.mark.parametrize("kind", ["rms", "layer"])
def test_a_branch_has_the_gradients_of_its_norm_and_of_the_residual(kind, case):
    module, rng = norm_of(64, "bfloat16", kind), seeds.rng()
    module.scale[...] = jnp.asarray(rng.standard_normal(64), jnp.float32)
    x, of_normed, of_x = jnp.asarray(rng.standard_normal((3, 8, 5, 64)), jnp.bfloat16)
    graphdef, state = nnx.split(module)

    @partial(jax.jit, static_argnums=0)
    def gradients(kernels, state, x):
        def both(state, x):
            norm = nnx.merge(graphdef, state)
            return branch(norm, x, kernels) if kernels else (norm(x), x)

        return jax.vjp(both, state, x)[1]((of_normed, of_x))

    shape, count = MESHES[case]
    with jax.set_mesh(sharding.make_mesh(shape, jax.devices()[:count])):
        found, expected = (gradients(kernels, state, x) for kernels in (REFERENCE, None))
    for ours, theirs in zip(*map(jax.tree.leaves, (found, expected)), strict=True):
        # Theirs rounds the gradient of the norm before it adds.
        assert relative_error(ours, theirs) < 3 * ROUNDING


def test_kernels_differentiate_mapped_branches_one_after_the_other():
    module, rng = norm_of(64, "bfloat16"), seeds.rng()
    x = jnp.asarray(rng.standard_normal((3, 2, 5, 64)), jnp.bfloat16)

    def loss(x, kernels):
        return sum(jnp.sum(jnp.sin(a.astype(jnp.float32))) for a in branch(module, x, kernels))

    found, expected = (jax.vmap(partial(jax.grad(loss), kernels=k))(x) for k in (REFERENCE, None))
    assert relative_error(found, expected) < 3 * ROUNDING

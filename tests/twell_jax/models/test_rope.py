"""Rotary positions."""

import jax.numpy as jnp
import numpy as np

from tests import seeds
from twell_jax.config import ModelConfig
from twell_jax.models.rope import rope_table, rotate


def test_rotary_scores_depend_on_distance_only():
    config = ModelConfig(vocab_size=61, context=16, d_model=32, layers=2, heads=4, d_ff=48)
    q, k = seeds.rng().normal(size=(2, 1, 1, 4, 8)).astype(np.float32)

    def score(i, j):
        q_i, k_j = rotate(jnp.concatenate([q, k]), rope_table(jnp.array([[i], [j]]), config))
        return np.einsum("thd,thd->h", q_i, k_j)

    np.testing.assert_allclose(score(0, 0), np.einsum("bthd,bthd->h", q, k), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(score(107, 104), score(3, 0), rtol=1e-3, atol=1e-4)
    assert np.abs(score(4, 0) - score(3, 0)).min() > 1e-4

"""Speed-ups of the layers' forward and backward, with blocks that err in place of the kernels.

Clocks are those of what computes, and stop when the results are there.
"""

import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from twell_jax import CannotServe, sparse_ffn
from twell_jax.analysis import speedup, timing
from twell_jax.config import ModelConfig
from twell_jax.models import Transformer

CONFIG = ModelConfig(
    vocab_size=64, context=32, d_model=32, layers=2, heads=2, d_ff=64, dtype="float32"
)


@pytest.fixture
def errs_by_2_percent_in_dx(monkeypatch):
    """Kernels whose output is right; the gradients for which they were asked."""
    asked = []

    def dense(x, *weights, implementation, gradients, **options):
        if implementation == "mosaic":
            asked.append(gradients)
            x = 1.02 * x - jax.lax.stop_gradient(0.02 * x)
        return sparse_ffn(x, *weights, **options, implementation="xla")

    jax.clear_caches()  # blocks with the same operands share programs
    monkeypatch.setattr(speedup, "sparse_ffn", dense)
    monkeypatch.setattr(speedup.timing, "milliseconds", lambda f, *a, calls: 2.0)
    yield asked
    jax.clear_caches()


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_gradients_are_sparse_and_their_errors_count(gated, errs_by_2_percent_in_dx):
    model = Transformer(CONFIG.model_copy(update={"gated": gated}), rngs=nnx.Rngs(seeds.integer()))
    tokens = seeds.rng().integers(0, 64, (3, 33))
    forward = speedup.measure_speedup(model, tokens)
    assert set(errs_by_2_percent_in_dx) == {None}
    np.testing.assert_allclose(forward.mosaic_error, 0, atol=1e-5)
    errs_by_2_percent_in_dx.clear()
    both = speedup.measure_speedup(model, tokens, backward=True)
    assert set(errs_by_2_percent_in_dx) == {"sparse"}
    np.testing.assert_allclose(both.mosaic_error, 0.02, rtol=1e-3)
    np.testing.assert_allclose(both.xla_error, 0, atol=1e-5)
    np.testing.assert_array_equal(both.nnz, forward.nnz)


def test_sequences_that_are_shorter_than_the_context_fill_the_call(
    errs_by_2_percent_in_dx, monkeypatch
):
    monkeypatch.setattr(speedup, "TOKENS", 70)
    model = Transformer(CONFIG, rngs=nnx.Rngs(seeds.integer()))
    tokens = seeds.rng().integers(0, 64, (9, 9))
    assert speedup.measure_speedup(model, tokens).tokens == 8 * 8
    assert speedup.measure_speedup(model, tokens[:3]).tokens == 3 * 8


def test_a_model_with_biases_is_refused():
    model = Transformer(CONFIG.model_copy(update={"mlp_bias": True}), rngs=nnx.Rngs(0))
    with pytest.raises(CannotServe, match="the kernels add no biases"):
        speedup.measure_speedup(model, np.zeros((1, 33), np.int32))


def test_a_model_with_8_bit_weights_is_refused():
    model = Transformer(CONFIG, rngs=nnx.Rngs(0))
    model.quantise(["gate"])
    with pytest.raises(CannotServe, match="8-bit floats"):
        speedup.measure_speedup(model, np.zeros((1, 33), np.int32))


@pytest.mark.gpu
def test_kernels_compute_both_passes_of_a_models_layers():
    shapes = {"d_model": 256, "d_ff": 512, "context": 1024, "dtype": "bfloat16"}
    model = Transformer(CONFIG.model_copy(update=shapes), rngs=nnx.Rngs(seeds.integer()))
    tokens = seeds.rng().integers(0, 64, (2, 1025))
    both = speedup.measure_speedup(model, tokens, backward=True)
    assert both.tokens == 2048 and len(both.factor) == 2
    assert max(both.mosaic_error) < 0.01 and max(both.xla_error) < 0.01


def test_results_are_waited_for():
    def sleep(x):
        time.sleep(0.02)
        return x

    x = jnp.ones(3)
    sleeping = jax.jit(lambda x: jax.pure_callback(sleep, x, x))
    assert timing.milliseconds(sleeping, x, calls=2, repeats=3) >= 20


def test_the_clock_is_lowered_without_a_gpu(lower):
    assert lower(lambda: timing._gpu_clock(3.0)).count("@mosaic_gpu") == 1


@pytest.mark.gpu
def test_the_clock_of_a_gpu_goes_on_while_it_is_held():
    stamps = [timing._clock(hold) for hold in (0.0, 5.0, 0.0)]
    first, held, last = (np.asarray(stamp).view(np.int64)[0] for stamp in stamps)
    assert first + 5e6 <= held <= last

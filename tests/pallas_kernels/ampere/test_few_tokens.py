"""Blocks of few tokens without clusters."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.ampere import columns
from pallas_kernels.kernels import AMPERE, REFERENCE
from pallas_kernels.quantised import quantise
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights
from tests.errors import ROUNDING, relative_error
from tests.launches import launches
from tests.pallas_kernels.hopper.decode import test_few_tokens as few
from tests.pallas_kernels.hopper.decode.blocks import assert_matches
from tests.poisoned import on_poisoned_memory

SHARED_BYTES = 99 * 1024


def run(x, *weights, live=None, rectifier=RELU):
    weights = dataclasses.replace(Weights(*weights), live=live)
    return AMPERE.few_tokens_ffn(x, weights, rectifier)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        (7, 192, 256, 0.05, jnp.bfloat16, True),
        (19, 128, 128, 0.2, jnp.float16, True),
        (9, 320, 128, 1.0, jnp.bfloat16, False),
    ],
)
def test_matches_dense_in_the_interpreter(case, interpreted):
    operands = few.draw_block(*case)
    with interpreted():
        assert_matches(run(*operands), *operands)


@pytest.mark.slow
def test_more_open_rows_than_are_listed_in_the_interpreter(interpreted, monkeypatch):
    monkeypatch.setattr(columns, "_LISTED", 16)
    operands = few.draw_block(2, 128, 128, 0.5, jnp.bfloat16, False)
    with interpreted():
        assert_matches(run(*operands), *operands)


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_non_finite_where_dense_is_in_the_interpreter(gated, interpreted):
    x, *weights = few.draw_block(4, 128, 128, 0.05, jnp.bfloat16, True)
    operands = (few.with_non_finite_rows(x), weights[0] if gated else None, *weights[1:])
    with interpreted():
        few.assert_non_finite_as_in_dense(run(*operands), *operands)


@pytest.mark.slow
@pytest.mark.parametrize("act", [Rectifier(0.5, squared=True), Rectifier(both=True)])
def test_other_activations_and_live_neurons_in_the_interpreter(act, interpreted):
    operands = few.draw_block(5, 128, 128, 0.5, jnp.float16, True)
    options = dict(live=jnp.array([40], jnp.int32), rectifier=act)
    with interpreted():
        out = run(*operands, **options)
    assert_is_the_references(out, operands, **options)


def assert_is_the_references(out, operands, *, live, rectifier):
    x, *weights = operands
    weights = dataclasses.replace(Weights(*weights), live=live)
    expected = jax.jit(REFERENCE.few_tokens_ffn, static_argnums=2)(x, weights, rectifier)
    (y, nnz, l1, fired), (y_ref, nnz_ref, l1_ref, _) = map(jax.device_get, (out, expected))
    # Of the gate, which a square doubles, h and y; the reference rounds them, too, but for h.
    assert relative_error(y, y_ref.astype(np.float64)) < 4 * ROUNDING
    assert relative_error(l1, l1_ref.astype(np.float64)) < 4 * ROUNDING
    assert relative_error(nnz, nnz_ref.astype(np.float64)) < ROUNDING  # gates at the threshold
    assert fired[: int(live[0])].any() and not fired[int(live[0]) :].any()


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("m", "d", "h", "dtype", "gated"),
    [
        (1, 2048, 5632, jnp.bfloat16, True),
        (7, 192, 384, jnp.float16, True),
        (64, 8192, 65536, jnp.bfloat16, True),
        (8, 768, 5632, jnp.bfloat16, False),
    ],
)
def test_lowers_into_99_kb(lower, m, d, h, dtype, gated):
    x, weights = few.shapes(m, d, h, dtype, gated)
    found = launches(lower(AMPERE.few_tokens_ffn, x, weights))
    assert found.keys() == {"few_hidden", "few_down"}
    assert max(launch.smem for launch in found.values()) <= SHARED_BYTES


def test_8_bit_weights_are_the_references(lower):
    x, weights = few.shapes(3, 128, 256, jnp.bfloat16)
    quantised = dataclasses.replace(weights, gate=jax.eval_shape(quantise, weights.gate))
    assert not launches(lower(AMPERE.few_tokens_ffn, x, quantised))


@pytest.mark.gpu
@pytest.mark.parametrize("case", few.ON_THE_GPU)
def test_matches_dense(case):
    operands = few.draw_block(*case)
    assert_matches(on_poisoned_memory(run, *operands), *operands)


@pytest.mark.gpu
def test_same_bits_every_time():
    operands = few.draw_block(33, 2048, 5632, 0.01, jnp.bfloat16, True)
    first, *others = (on_poisoned_memory(run, *operands) for _ in range(4))
    for a, b in ((a, b) for other in others for a, b in zip(first, other, strict=True)):
        np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


@pytest.mark.gpu
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(("m", "d"), [(4, 192), (33, 2048)])
def test_non_finite_where_dense_is(m, d, gated):
    x, *weights = few.draw_block(m, d, 384, 0.05, jnp.bfloat16, True)
    operands = (few.with_non_finite_rows(x), weights[0] if gated else None, *weights[1:])
    few.assert_non_finite_as_in_dense(on_poisoned_memory(run, *operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("act", [Rectifier(0.5, squared=True), Rectifier(both=True)])
def test_other_activations_and_live_neurons(act, dtype):
    operands = few.draw_block(21, 640, 1408, 0.5, dtype, True)
    options = dict(live=jnp.array([1000], jnp.int32), rectifier=act)
    assert_is_the_references(run(*operands, **options), operands, **options)

"""Activity statistics against plain numpy, and the pattern against what the model itself counts."""

import functools
import json

import jax
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from twell_jax.analysis.activity import (
    Activity,
    activity_patterns,
    concentration,
    measure_activity,
    summarise,
    union_share,
)

END = 60
make = functools.partial(drawn.small, layers=3)

forward = nnx.jit(lambda model, tokens: model(tokens))
forward_documents = nnx.jit(lambda model, tokens: model(tokens, document_end=END))


def draw_sequences(count=3):
    """In most tests three in a batch, for which a program is compiled."""
    return seeds.rng().integers(0, END, (count, 19))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False])
def test_the_pattern_holds_what_each_prefix_of_a_sequence_fires(gated):
    model, sequences = make(gated=gated), draw_sequences()
    ((ce, fired),) = activity_patterns(model, sequences, batch=3)
    assert fired.shape == (3, 3, 18, 48) and fired.dtype == bool
    for length in (5, 18):
        logits, stats = jax.device_get(forward(model, sequences[:, :length]))
        prefix = np.asarray(fired)[:, :, :length]
        np.testing.assert_array_equal(prefix.any((1, 2)), stats.fired)
        np.testing.assert_allclose(prefix.sum(-1).mean((1, 2)), stats.nnz, rtol=1e-6)
    picked = np.take_along_axis(logits, sequences[:, 1:, None], axis=-1)[..., 0]
    expected = np.log(np.exp(logits, dtype=np.float64).sum(-1)) - picked
    np.testing.assert_allclose(ce, expected, rtol=1e-5)


def test_documents_are_kept_apart_where_the_run_did():
    model, sequences = make(), draw_sequences()
    sequences[:, 4] = END
    found = activity_patterns(model, sequences, batch=3, document_end=END)
    ((_, fired),) = jax.device_get([*found])
    np.testing.assert_array_equal(
        np.any(fired, (1, 2)), forward_documents(model, sequences[:, :-1])[1].fired
    )
    ((_, unmasked),) = jax.device_get([*activity_patterns(model, sequences, batch=3)])
    np.testing.assert_array_equal(unmasked[:, :, :5], fired[:, :, :5])
    assert np.any(unmasked != fired)


def test_a_model_that_names_the_kernels_is_measured_anywhere():
    kernels = make(ffn_implementation="mosaic", ffn_gradients="sparse")
    model, sequences = make(), draw_sequences()
    nnx.update(kernels, nnx.state(model))
    ((_, expected),) = activity_patterns(model, sequences, batch=3)
    ((_, fired),) = activity_patterns(kernels, sequences, batch=3)
    np.testing.assert_array_equal(fired, expected)


@pytest.mark.parametrize(("count", "batch"), [(5, 3), (3, 8)])
def test_activity_counts_the_pattern_in_any_batches(count, batch):
    model, sequences = make(), draw_sequences(count)
    ce, fired = zip(*activity_patterns(model, sequences, batch=batch), strict=True)
    ce, fired = np.concatenate(ce), np.concatenate(fired, axis=1)
    assert ce.shape == (count, 18) and fired.shape == (3, count, 18, 48)
    activity = measure_activity(model, sequences, batch=batch)
    np.testing.assert_allclose(activity.ce, np.mean(ce), rtol=1e-6)
    np.testing.assert_array_equal(activity.nnz, fired.sum(-1))
    np.testing.assert_array_equal(activity.usage, fired.sum((1, 2)))
    assert list(activity.union) == [1, 4, 16]  # of 18 tokens
    for size, shares in activity.union.items():
        starts = range(0, 18 - size + 1, size)
        unions = [fired[:, :, start : start + size].any(2) for start in starts]
        np.testing.assert_allclose(shares, np.mean(unions, (0, 2, 3)), rtol=1e-6)


@pytest.mark.parametrize("size", [1, 2, 3, 5, 6, 9, 10])  # with and without a rest
def test_the_union_of_windows(size):
    fired = seeds.rng().random((2, 10, 7)) < 0.3
    windows = [fired[:, i * size : (i + 1) * size] for i in range(10 // size)]
    expected = np.mean([window.any(1).mean(1) for window in windows], axis=0)
    np.testing.assert_allclose(union_share(fired, size), expected, rtol=1e-6)


def test_concentration_counts_the_most_used_first():
    found = concentration(np.array([[1, 6, 0, 3], [0, 0, 0, 0]]))
    np.testing.assert_allclose(found, [[0.6, 0.9, 1.0, 1.0], [0, 0, 0, 0]])


def test_the_summary_says_what_a_person_would_count():
    nnz = np.array([[[0, 10, 20], [40, 10, 20]]], np.int32)
    usage = np.zeros((1, 50), np.int64)
    usage[0, [3, 11, 20, 49]] = [60, 25, 10, 5]
    summary = summarise(Activity(1.5, nnz, usage, {1: np.array([1 / 3]), 4: np.array([0.5])}))
    assert json.loads(json.dumps(summary)) == summary
    assert summary == {
        "d_ff": 50,
        "sequences": 2,
        "tokens": 6,
        "held_out_ce": 1.5,
        "nnz_mean": [pytest.approx(100 / 6)],
        "nnz_p50": [15.0],
        "nnz_p99": [pytest.approx(39.0)],
        "nnz_max": [40],
        "sparsity": [pytest.approx(2 / 3)],
        "dead": [46],
        "nnz_by_position": [[20.0, 10.0, 20.0]],
        "union": {"1": [pytest.approx(1 / 3)], "4": [0.5]},
        "top_percent": {"1": [0.6], "5": [pytest.approx(0.85)], "10": [1.0], "25": [1.0]},
    }

"""benchmarks.training: rows of a whole step, with the pattern that it asks for."""

import pytest

from benchmarks import training
from twell_jax import config


def test_a_step_is_measured_on_the_pattern(monkeypatch):
    monkeypatch.setattr(training.jax, "set_mesh", lambda mesh: None)
    settings = config.from_dict(
        {
            "run_dir": "unused",
            "steps": 10,
            "batch_tokens": 16 * 64,
            "micro_batch": 2,
            "optimizer": {"lr": 1e-30},
            "model": {
                "vocab_size": 61, "context": 64, "d_model": 128, "layers": 2, "heads": 2,
                "d_ff": 512,
            },
        }
    )  # fmt: skip
    row = training.measure(settings, 20, sparse=False)
    assert row["sparse_layers"] == 0 and row["tokens_per_second"] > 0 and row["peak_bytes"] > 0
    # And the first token of 64 fires most neurons.
    assert sum(row["nnz_by_layer"]) / 2 == pytest.approx(20 + 500 / 64, rel=0.3)

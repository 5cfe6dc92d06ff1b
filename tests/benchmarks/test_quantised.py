"""The benchmark of quality: its rows compare what they say."""

import json
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import quantised
from benchmarks.pages import TABLES
from tests import seeds
from tests.twell_jax import drawn
from twell_jax import config as config_lib
from twell_jax.data.tokenizers import ByteTokenizer


def test_differences_are_counted_over_sequences_and_activations():
    rng = seeds.rng()
    ce = rng.random((2, 5, 7))
    fired = rng.random((2, 3, 5, 7, 11)) < 0.3

    def batches(i):
        return [(ce[i, part], fired[i][:, part]) for part in (slice(0, 3), slice(3, 5))]

    row = quantised.compare(zip(batches(0), batches(1), strict=True))
    assert row["ce"] == pytest.approx(ce[1].mean())
    assert row["increase"] == pytest.approx(ce[1].mean() / ce[0].mean() - 1)
    by_sequence = (ce[1] - ce[0]).mean(1) / ce[0].mean()
    assert row["uncertainty"] == pytest.approx(by_sequence.std() / 5**0.5)
    assert row["fired"] == pytest.approx(fired[1].sum() / fired[0].sum())
    changed = (fired[0] != fired[1]).sum(axis=(1, 2, 3)) / fired[0].sum(axis=(1, 2, 3))
    np.testing.assert_allclose(row["changed_by_layer"], changed, atol=1e-5)
    same = quantised.compare(zip(batches(0), batches(0), strict=True))
    assert same["increase"] == same["changed"] == 0


@pytest.mark.slow
def test_a_record_of_a_run(tmp_path, monkeypatch):
    shape = dict(vocab_size=257, context=8, d_model=32, layers=1, heads=2, d_ff=48, init_scale=0.3)
    model = drawn.transformer(**shape, dtype="float32")
    config = config_lib.from_dict(
        {"run_dir": "x", "steps": 1, "batch_tokens": 16, "micro_batch": 2, "model": shape}
    )
    held_out = seeds.rng().integers(0, 257, (4, 9))
    monkeypatch.setattr(quantised, "load_run", lambda _: (config, ByteTokenizer(), model))
    monkeypatch.setattr(quantised.data, "load", lambda *_: SimpleNamespace(held_out=held_out))
    monkeypatch.setattr("sys.argv", ["quantised", "runs/some", "--out", str(tmp_path)])
    quantised.main()
    (path,) = tmp_path.glob("quantised-*.json")
    rows = {row["implementation"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["bfloat16", *quantised.VARIANTS]
    assert rows["bfloat16"]["increase"] == rows["bfloat16"]["changed"] == 0
    assert rows["bfloat16"]["tokens"] == 32 and rows["bfloat16"]["run"] == "some"
    # Rounding to 8 bits moves more activations over zero than rounding to 16 does.
    assert 0 < rows["float32"]["changed"] < rows["fp8 gate"]["changed"] < 0.2
    assert TABLES["quantised"].render(rows.values()).count("\n") == 3 + len(rows)

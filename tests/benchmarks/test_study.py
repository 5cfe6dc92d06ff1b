"""The study as it is started, on a model of no use."""

import json

import pytest

from benchmarks.study import __main__ as study
from benchmarks.study import report


@pytest.mark.slow
def test_variants_are_trained_once_and_reported(tmp_path, monkeypatch):
    text = tmp_path / "text"
    text.mkdir()
    for i in range(40):
        (text / f"{i}.txt").write_text(f"{i} words that no model needs to learn. " * 80)
    small = [
        f"run_dir={tmp_path}/runs", "steps=2", "batch_tokens=1024", "micro_batch=4",
        "eval_sequences=4", "optimizer.warmup_steps=1", "model.vocab_size=300",
        "model.context=256", "model.d_model=32", "model.layers=2", "model.heads=2",
        "model.d_ff=128", "data.source=files", f"data.paths=[{text}/*.txt]",
        "data.held_out_fraction=0.3", f"data.cache_dir={tmp_path}/tokens",
    ]  # fmt: skip

    def run(*names):
        monkeypatch.setattr("sys.argv", ["study", *small, "--out", str(tmp_path), "--only", *names])
        study.main()
        (path,) = tmp_path.glob("study-*.json")
        return json.loads(path.read_text())["rows"]

    first = run("relu")
    rows = run("relu", "l1 3.0e-4, not gated")
    assert rows[0] == first[0]
    assert [row["variant"] for row in rows] == ["relu", "l1 3.0e-4, not gated"]
    assert rows[1]["d_ff"] == 4224 and "model.gated=false" in rows[1]["settings"]
    lines = report.table(rows).splitlines()
    assert len(lines) == 4 and f"| relu | {first[0]['held_out_ce']:.3f} |" in lines[2]
    rows[0]["speedup"] = {"nnz": [5, 9], "factor": [2, 1.5], "xla_ms": [3, 3], "mosaic_ms": [1, 2]}
    assert report.table(rows).splitlines()[2].endswith("| 6.00 | 3.00 | 2.00x |")
    for path in report.plots(rows, tmp_path):
        assert path.read_bytes().startswith(b"\x89PNG")

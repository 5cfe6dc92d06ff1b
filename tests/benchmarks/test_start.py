"""benchmarks.start: rows of a small model, each start a process of its own."""

import json

import pytest

from benchmarks import start
from benchmarks.pages import TABLES

SMALL = """
run_dir: x
steps: 1
batch_tokens: 64
micro_batch: 1
model: {vocab_size: 300, context: 64, d_model: 128, layers: 1, heads: 4, d_ff: 256}
"""


@pytest.mark.slow
def test_a_record_has_each_kind_of_start(monkeypatch, tmp_path):
    config = tmp_path / "2b.yaml"
    config.write_text(SMALL)
    monkeypatch.setattr(start, "FRESH", 1)
    monkeypatch.setattr(start, "AGAIN", 1)
    monkeypatch.setattr("sys.argv", ["start", str(config), "--out", str(tmp_path)])
    start.main()
    (path,) = tmp_path.glob("start-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [(row["model"], row["start"]) for row in rows] == [
        ("2b", "imports"), ("2b", "fresh"), ("2b", "again"),
    ]  # fmt: skip
    assert [len(row["runs"]) for row in rows] == [1, 1, 1]
    assert f"| again | {rows[-1]['seconds']:.1f} |" in TABLES["start"].render(rows)


def test_a_start_that_fails_is_none():
    with pytest.raises(start.subprocess.CalledProcessError):
        start.seconds(["-c", "print('first'); raise SystemExit(3)"], {})

"""The study as it is started, on a model of no use."""

import json

import numpy as np
import pytest

from benchmarks import render
from benchmarks.study import __main__ as study
from benchmarks.study import report
from tests.small_run import SETTINGS


def test_a_study_goes_on_from_its_record(tmp_path, monkeypatch):
    measured = []
    monkeypatch.setattr(
        study, "measure", lambda name, _: measured.append(name) or {"variant": name}
    )

    def run(directory, *arguments):
        measured.clear()
        monkeypatch.setattr("sys.argv", ["study", "--out", str(tmp_path / directory), *arguments])
        study.main()
        (path,) = (tmp_path / directory).glob("study-*.json")
        return measured, path

    _, path = run("first", "--only", "relu", "silu")
    elsewhere = tmp_path / "of-another-day.json"
    content = json.loads(path.read_text())
    del content["base"]["sparse_gradients_every"]  # a key that the record is older than
    elsewhere.write_text(json.dumps(content))
    arguments = ["--only", "relu", "l1 1.0e-4", "--resume", str(elsewhere)]
    assert run("second", *arguments)[0] == ["l1 1.0e-4"]
    names, path = run("second", *arguments, f"run_dir={tmp_path}")
    assert names == []
    rows = json.loads(path.read_text())["rows"]
    assert [row["variant"] for row in rows] == ["relu", "silu", "l1 1.0e-4"]

    with pytest.raises(SystemExit, match=r"model.layers: .*-day.json was measured with 8, now 4;"):
        run("third", *arguments, "model.layers=4")
    with pytest.raises(SystemExit, match=r"sparse_gradients_every: .* with 0, now 9;"):
        run("third", *arguments, "sparse_gradients_every=9")
    elsewhere.write_text(json.dumps(json.loads(elsewhere.read_text()) | {"device": "abacus"}))
    with pytest.raises(SystemExit, match=r"-day.json: measured on abacus, this is"):
        run("third", *arguments)


def test_positions_are_averaged_over_ranges():
    analysis = {"nnz_by_position": [[8, 4, 2, 4, 1, 2], [1, 1, 1, 1, 1, 1]], "d_ff": 9}
    assert study.over_position_ranges(analysis) == {
        "positions": [(0, 1), (1, 2), (2, 4), (4, 6)],
        "nnz_by_position": [[8, 4, 3, 1.5], [1, 1, 1, 1]],
        "d_ff": 9,
    }


def a_row(variant, nnz, share, factor, *settings):
    layers = len(nnz)
    return {
        "variant": variant, "settings": ["run_dir=runs", *settings], "d_ff": 10,
        "held_out_ce": 2.0, "nnz_mean": nnz, "sparsity": [0.5] * layers, "dead": [1] * layers,
        "positions": [[0, 1], [1, 2]], "nnz_by_position": [[4, 2]] * layers,
        "union": {"256": share},
        "speedup": {
            "nnz": nnz, "factor": factor, "xla_ms": factor, "mosaic_ms": [1.0] * layers,
        },
    }  # fmt: skip


def test_the_report_shows_the_variants_by_their_l1_coefficient(tmp_path, monkeypatch):
    rows = [
        a_row("not gated", [9, 2, 1], [0.9, 0.9, 0.1], [1, 2, 3], "model.gated=false"),
        a_row("l1 1.0e-3", [5, 6, 9], [0.1, 0.2, 0.3], [3, 2, 1], "l1_coefficient=1.0e-3"),
        a_row("l1 3.0e-4", [5, 6, 9], [0.1, 0.2, 0.3], [3, 2, 1], "l1_coefficient=3.0e-4"),
    ]
    path, out = tmp_path / "study.json", tmp_path / "pages"
    origin = {"device": "abacus", "date": "today", "commit": None, "versions": {"jax": "0"}}
    path.write_text(json.dumps({"benchmark": "study", **origin, "rows": rows}))
    monkeypatch.setattr("sys.argv", ["render", str(path), "--out", str(out)])
    render.main()
    text = (out / "study.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")][1:]
    assert [line.split(" | ")[0] for line in lines] == [
        "| not gated", "| l1 3.0e-4", "| l1 1.0e-3",
    ]  # fmt: skip
    assert lines[1].endswith("| 6.00 | 3.00 | 2.00x |")
    r = "-0.961 with mean nnz, -1.000 with 256 tokens share"  # 5, 6, 9 and .1, .2, .3: 3, 2, 1
    notes = [line for line in text.splitlines() if line.startswith("- ")]
    assert notes == [f"- all gated: {r}", f"- l1 3.0e-4: {r}", f"- l1 1.0e-3: {r}"]
    for plot in ("cross-entropy", "depth", "position", "speedup"):
        assert (out / f"study-{plot}.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.slow
def test_variants_are_trained_once_and_reported(
    tmp_path, monkeypatch, text_settings, in_this_process
):
    small = [*SETTINGS, f"run_dir={tmp_path}/runs", *text_settings]

    def run(*names):
        monkeypatch.setattr("sys.argv", ["study", *small, "--out", str(tmp_path), "--only", *names])
        study.main()
        (path,) = tmp_path.glob("study-*.json")
        return json.loads(path.read_text())["rows"]

    first = run("relu")
    rows = run("relu", "l1 3.0e-4, not gated")
    assert rows[0] == first[0]
    assert rows[0]["positions"][:4] == [[0, 1], [1, 2], [2, 4], [4, 8]]
    assert np.shape(rows[0]["nnz_by_position"]) == (2, len(rows[0]["positions"])) == (2, 7)
    assert [row["variant"] for row in rows] == ["relu", "l1 3.0e-4, not gated"]
    assert rows[1]["d_ff"] == 4224 and "model.gated=false" in rows[1]["settings"]
    lines = report.TABLE.render(rows).splitlines()
    assert len(lines) == 4 and f"| relu | {first[0]['held_out_ce']:.3f} |" in lines[2]
    assert report.correlations(rows) == {}

"""The study as it is started, on a model of no use."""

import json
import re
import subprocess
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import render
from benchmarks.study import __main__ as study
from benchmarks.study import downstream, measure, report
from benchmarks.study import merge as merge_command
from benchmarks.study.runs import VARIANTS
from tests.small_run import SETTINGS
from twell_jax.config import ConfigError
from twell_jax.ffn import CannotServe
from twell_jax.plotting import drawn
from twell_jax.train.run_directory import RunPaths


@pytest.fixture
def study_of(tmp_path, monkeypatch, text_settings):
    """`study_of(directory, *arguments)` starts the study on a small model and text."""
    small = [*SETTINGS, f"run_dir={tmp_path}/runs", "data.tokenizer=byte", *text_settings]
    monkeypatch.setattr(study.variants, "share_programs", lambda _: None)  # it is for a process

    def run(directory, *arguments):
        out = tmp_path / directory
        monkeypatch.setattr("sys.argv", ["study", *small, "--out", str(out), *arguments])
        study.main()
        (path,) = out.glob("study-*.json")
        return path

    return run


@pytest.fixture
def runs(monkeypatch):
    """The runs that were started, none of which is trained; the clock is 100 s later after each."""
    started, now = [], [0.0]

    def measured(variant, seed, _):
        started.append((variant.name, seed))
        now[0] += 100
        if variant.name == "silu":
            raise subprocess.CalledProcessError(1, "train")
        if variant.method == "lasso":
            raise ConfigError("it was stopped")
        return {"variant": variant.name, "seed": seed}

    monkeypatch.setattr(study, "measured", measured)
    monkeypatch.setattr(study.time, "monotonic", lambda: now[0])
    return started


def rows_of(path):
    return json.loads(path.read_text())["rows"]


def test_a_study_goes_on_from_its_record(study_of, runs, tmp_path):
    first = study_of("first", "--only", "l1 3.0e-3", "relu", "--seeds", "0")
    assert runs == [("relu", 0), ("l1 3.0e-3", 0)]  # in the order of the table
    elsewhere = tmp_path / "of-another-day.json"
    content = json.loads(first.read_text())
    del content["base"]["sparse_gradients_every"]  # a key that the record is older than
    elsewhere.write_text(json.dumps(content))
    runs.clear()
    more = ["--only", "relu", "l1 1.0e-3", "--seeds", "0", "1", "--resume", str(elsewhere)]
    second = study_of("second", *more)
    assert runs == [("l1 1.0e-3", 0), ("relu", 1), ("l1 1.0e-3", 1)]
    study_of("second", *more)  # nothing is left
    assert [(row["variant"], row["seed"]) for row in rows_of(second)] == [
        ("relu", 0), ("l1 3.0e-3", 0), *runs,
    ]  # fmt: skip

    with pytest.raises(SystemExit, match=r"model.layers: .*-day.json was measured with 2, now 4;"):
        study_of("third", *more, "model.layers=4")
    with pytest.raises(SystemExit, match=r"sparse_gradients_every: .* with 0, now 9;"):
        study_of("third", *more, "sparse_gradients_every=9", "model.ffn_implementation=mosaic")
    with pytest.raises(SystemExit, match=r"error: seed: every run has its own; write --seeds N"):
        study_of("third", *more, "seed=3")
    with pytest.raises(SystemExit, match=r"error: union_target: is counted in chunks"):
        study_of("third", "--only", "relu", "U target 0.1")
    content["rows"][0]["text"] = "of old"
    elsewhere.write_text(json.dumps(content))
    with pytest.raises(SystemExit, match=r"data: relu, seed 0, was .* digest of old, not .*;"):
        study_of("third", *more)
    elsewhere.write_text(json.dumps(content | {"device": "abacus"}))
    with pytest.raises(SystemExit, match=r"-day.json: measured on abacus, this is"):
        study_of("third", *more)
    assert len(runs) == 3


def test_no_run_is_started_that_would_end_too_late(study_of, runs, capsys):
    some = ["--only", "relu", "l1 1.0e-3", "--seeds", "0", "1"]
    path = study_of("out", *some, "--minutes", "5")
    assert runs == [("relu", 0), ("l1 1.0e-3", 0), ("relu", 1)]  # 300 of 300 s
    assert "no time is left for l1 1.0e-3, seed 1" in capsys.readouterr().out
    assert [row["seconds"] for row in rows_of(path)] == [100] * 3


def test_a_run_that_fails_leaves_the_others(study_of, runs, tmp_path):
    reasons = {"silu": "", "lasso 1.0e-3": " (it was stopped)"}
    names = [name for name in VARIANTS if name in {"relu", "l1 3.0e-4", *reasons}]
    missing = [f"{name}, seed 0{reasons[name]}" for name in names if name in reasons]
    message = re.escape(f"error: not measured: {'; '.join(missing)}")
    with pytest.raises(SystemExit, match=f"{message}$"):
        study_of("out", "--only", *names, "--seeds", "0")
    (path,) = (tmp_path / "out").iterdir()
    assert [row["variant"] for row in rows_of(path)] == ["relu", "l1 3.0e-4"]


def test_records_of_several_processes_are_merged(tmp_path, monkeypatch):
    def write(name, *runs, device="abacus", base=4):
        rows = [{"variant": v, "seed": s, "text": t, "from": name} for v, s, t in runs]
        details = {"device": device, "base": {"steps": base}, "commit": name}
        (tmp_path / name).write_text(json.dumps({**details, "rows": rows}))

    def merge(*names):
        arguments = [*(str(tmp_path / name) for name in names), "--out", str(tmp_path / "all")]
        monkeypatch.setattr("sys.argv", ["merge", *arguments])
        merge_command.main()
        return json.loads((tmp_path / "all").read_text())

    write("a", ("relu", 0, "t"), ("silu", 0, "t"))
    write("b", ("relu", 1, "t"), ("silu", 0, "t"))
    content = merge("a", "b")
    assert content["commit"] == "a" and content["base"] == {"steps": 4}
    assert {(row["variant"], row["seed"]): row["from"] for row in content["rows"]} == {
        ("relu", 0): "a", ("silu", 0): "b", ("relu", 1): "b",
    }  # fmt: skip
    write("c", ("relu", 2, "of others"))
    with pytest.raises(SystemExit, match=r"error: data: relu, seed 2, .* of others, not t, and"):
        merge("a", "c")
    write("c", ("relu", 2, "t"), base=5)
    with pytest.raises(SystemExit, match=r"error: steps: .* with 5, now 4"):
        merge("a", "c")
    write("c", ("relu", 2, "t"), device="brain")
    with pytest.raises(SystemExit, match=r"c: measured on brain, this is abacus"):
        merge("a", "c")
    with pytest.raises(SystemExit, match=r"error: .*missing"):
        merge("a", "missing")


def test_positions_are_averaged_over_ranges():
    analysis = {"nnz_by_position": [[8, 4, 2, 4, 1, 2], [1, 1, 1, 1, 1, 1]], "d_ff": 9}
    assert measure.over_position_ranges(analysis) == {
        "positions": [(0, 1), (1, 2), (2, 4), (4, 6)],
        "nnz_by_position": [[8, 4, 3, 1.5], [1, 1, 1, 1]],
        "d_ff": 9,
    }


def test_a_stopped_run_is_not_measured(tmp_path, monkeypatch):
    monkeypatch.setattr(measure, "load_run", lambda _: (SimpleNamespace(steps=8), None, None))
    line = {"step": 4, "held_out_ce": 2.0, "unigram_ce": 5.0}
    RunPaths(tmp_path).metrics.write_text(json.dumps(line) + "\n")
    with pytest.raises(ConfigError, match=r"the run was stopped; start the study again"):
        measure.measured(tmp_path)


def test_a_part_that_cannot_be_measured_leaves_the_others(capsys):
    def fails():
        raise RuntimeError("out of\nmemory")

    def cannot():
        raise CannotServe("no gate")

    found = measure.attempted({"a": fails, "b": cannot, "c": lambda: {"ms": 1}})
    assert found == {
        "a": None, "b": None, "c": {"ms": 1},
        "failures": {"a": "RuntimeError: out of", "b": "no gate"},
    }  # fmt: skip
    assert "RuntimeError: out of" in capsys.readouterr().err


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
    origin["command"] = f"python -m benchmarks.study data.paths=[{'a,' * 40}b] --seeds 1"
    path.write_text(json.dumps({"benchmark": "study", **origin, "rows": rows}))
    monkeypatch.setattr("sys.argv", ["render", str(path), "--out", str(out)])
    render.main()
    text = (out / "study.md").read_text()
    assert "`python -m benchmarks.study data.paths=[...] --seeds 1`" in text
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


def a_run(variant, seed, ce, factor, **more):
    """A row of three layers that take 2 ms by XLA and 2 / factor by the kernels."""
    factors = [factor + 0.1, factor, factor]
    ms = {"xla_ms": [2.0] * 3, "mosaic_ms": [2.0 / factor] * 3, "factor": factors}
    return a_row(variant, [5, 6, 9], [0.1, 0.2, 0.3], [1.0] * 3) | {
        "method": VARIANTS[variant].method, "seed": seed, "held_out_ce": ce,
        "evaluated": [(4, ce + 1), (8, ce)], "tokens_per_second": 1500,
        "speedup": ms | {"nnz": [5, 6, 9]},
        "training": ms | {"factor": [factor / 2] * 3}, "pruned": ms | {"mosaic_ms": [0.5] * 3},
        "model": {"forward": {"xla": 3.0, "mosaic": 2.0}, "training": {"xla": 9.0, "mosaic": 6.0}},
        "downstream": {task: {"items": 9, "accuracy": seed / 10} for task in downstream.TASKS},
    } | more  # fmt: skip


def test_the_report_shows_the_seeds_of_a_variant_together(tmp_path):
    unmeasured = {part: None for part in ("speedup", "training", "pruned", "skipping", "model")}
    rows = [
        a_run("l1 3.0e-3", 0, 2.0, 1.5),
        a_run(
            "lasso 1.0e-3",
            0,
            2.0,
            1.5,
            downstream={task: {"items": 0} for task in downstream.TASKS},
        ),
        a_run("l1 3.0e-3", 1, 1.9, 1.7, skipping={"mosaic_ms": [0.25] * 3}),
        a_run("l1 1.0e-3", 2, 1.8, 1.25, skipping={"mosaic_ms": [0.5] * 3}),
        a_run("silu", 0, 1.7, 1.0, **unmeasured),
    ]
    shared, _, *lines = report.TABLE.render(rows).splitlines()
    assert shared.startswith("All lines: of H ")
    assert [line.split(" | ")[:4] for line in lines[2:]] == [
        ["| silu", "1", "1.700", "2.700"],
        ["| l1 1.0e-3", "1", "1.800", "2.800"],
        ["| l1 3.0e-3", "2", "1.950 (1.900-2.000)", "2.950 (2.900-3.000)"],
        ["| lasso 1.0e-3", "1", "2.000", "3.000"],
    ]
    assert lines[2].endswith("| - | - | - | - | - | - |")
    assert lines[3].endswith("| 4.00x |")
    assert lines[4].endswith(
        "| 1.60x (1.50x-1.70x) | 4.00x (4.00x-4.00x) | 1.60x (1.50x-1.70x) | 8.00x, 1 seed |"
    )
    assert lines[5].endswith("| 1.50x | 4.00x | 1.50x | - |")
    models, layers, _ = report.describe(rows).split("\n\n")[1::2]
    assert "| silu | 1,500 | - | - | 0.0% | 0.0% | 0.0% |" in models
    assert (
        "| l1 3.0e-3 | 1,500 | 1.50x (1.50x-1.50x) | 1.50x (1.50x-1.50x) | 5.0% (0.0%-10.0%) |"
        in models
    )
    assert "| lasso 1.0e-3 | 1,500 | 1.50x | 1.50x | - | - | - |" in models
    assert "| l1 3.0e-3 | 1.70 / 0.80 | 1.60 / 0.80 | 1.60 / 0.80 |" in layers
    assert "silu" not in layers
    for suffix, draw in report.TABLE.plots.items():
        with drawn(tmp_path / f"{suffix}.png") as figure:
            draw(figure, {"rows": rows})


@pytest.mark.slow
def test_runs_are_trained_and_measured(study_of, in_this_process, reference_kernels, tmp_path):
    """The kernels' definitions stand for the kernels."""
    rows = rows_of(study_of("out", "--only", "relu", "silu", "--seeds", "7"))
    relu, silu = rows
    assert [row["method"] for row in rows] == ["relu", "silu"]
    assert relu["seed"] == 7 and "seed=7" in relu["settings"]
    assert relu["positions"][:4] == [[0, 1], [1, 2], [2, 4], [4, 8]]
    assert np.shape(relu["nnz_by_position"]) == (2, len(relu["positions"])) == (2, 7)
    for passes in ("speedup", "training", "pruned", "skipping"):
        assert len(relu[passes]["factor"]) == 2 and max(relu[passes]["mosaic_error"]) < 0.01
        assert silu[passes] is None and "silu" in silu["failures"][passes]
    assert relu["model"]["training"].keys() == {"xla", "mosaic"}
    ((step, ce),) = relu["evaluated"]
    assert step == 3 and ce == pytest.approx(relu["held_out_ce"], rel=1e-3)
    assert not any((tmp_path / "runs").glob("*/checkpoints"))
    shared, _, *lines = report.TABLE.render(rows).splitlines()
    assert shared == "All lines: seeds 1, of H 256."
    assert len(lines) == 4 and f"| relu | {relu['held_out_ce']:.3f} |" in lines[2]

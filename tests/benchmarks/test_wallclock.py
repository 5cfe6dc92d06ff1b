"""benchmarks.wallclock: runs of one configuration on the same tokens, compared over time."""

import json
import shutil
import subprocess
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from benchmarks import render, variants, wallclock
from benchmarks.pages import TABLES
from tests.commands import succeeded
from tests.small_run import SETTINGS
from twell_jax import config as config_lib
from twell_jax import data

# The recipe is not for so few neurons and steps.
_NO_TARGET = ["union_target=null", "lasso_share=0", "skip_dead_every=0"]


@pytest.fixture
def in_this_process(monkeypatch):
    """The first run goes to its end, in this process; to save time the others leave the same."""
    trained = []

    class Ended:
        def __init__(self, command, env):
            assert env["JAX_ENABLE_COMPILATION_CACHE"] == "false"
            run_dir = Path(command[-1].removeprefix("run_dir="))
            if trained:
                shutil.copytree(trained[0], run_dir)
            else:
                succeeded(*command[1:])
            trained.append(run_dir)
            self.returncode = 0

        def __enter__(self):
            return self

        def __exit__(self, *_):
            pass

        def poll(self):
            return self.returncode

    monkeypatch.setattr(variants, "subprocess", SimpleNamespace(Popen=Ended))


def a_row(name, ce, seconds, joules, unigram_ce=6.5):
    evaluated = {"step": [4, 8, 12], "held_out_ce": ce, "seconds": seconds, "joules": joules}
    logged = {
        "step": [6, 12], "seconds": [seconds[0], seconds[-1]], "ce": [3.0, 2.0],
        "tokens_per_second": [50.0, 60.0], "nnz": [9.0, 5.25], "sparse_layers": [0, 2],
    }  # fmt: skip
    totals = {"steps": 12, "tokens": 1200, "seconds": seconds[-1], "joules": joules[-1]}
    return {"variant": name, **totals, "unigram_ce": unigram_ce, "logged": logged,
            "evaluated": evaluated}  # fmt: skip


def all_rows(**changes):
    return {
        "sparse": a_row("sparse", [3.0, 2.0, 1.0], [10, 20, 30], [100, 200, 300], **changes),
        "silu": a_row("silu", [4.0, 2.0, 1.5], [10, 30, 50], [200, 600, 1000]),
        "relu": a_row("relu", [4.0, 1.5, 1.75], [20, 40, 60], [200, 500, 1000]),
        **{
            name: a_row(name, [4.0, 2.0, 1.0], [20, 40, 60], [200, 500, 1000])
            for name in ("silu, float8", "sparse, float8")
        },
    }


def test_runs_are_compared_at_equal_ce_and_at_equal_cost():
    rows = wallclock.compare(all_rows())
    assert [row["variant"] for row in rows] == list(wallclock.RUNS)
    assert all(row["equal_ce"] == 1.5 for row in rows)
    # The sparse run falls from 2 to 1 between 20 and 30 s; relu rises again later.
    assert [row["seconds_to_equal_ce"] for row in rows] == [50, 40, 50, 25, 50]
    assert [row["seconds_gain"] for row in rows] == [1, 1.25, 1, 2, 1]
    assert [row["joules_to_equal_ce"] for row in rows] == [1000, 500, 750, 250, 750]
    assert all((row["equal_seconds"], row["equal_joules"]) == (30, 300) for row in rows)
    assert [row["ce_at_equal_seconds"] for row in rows] == [2.0, 2.75, 3.0, 1.0, 3.0]
    assert [row["ce_at_equal_joules"] for row in rows] == pytest.approx(
        [3.5, 4 - 2.5 / 3, 4 - 2 / 3, 1.0, 4 - 2 / 3]
    )
    again = wallclock.compare({row["variant"]: row for row in rows})  # as read from a record
    assert again == rows


def test_a_run_that_falls_behind_is_compared_where_it_got_to_and_changes_no_other():
    rows = all_rows()
    rows["relu"]["evaluated"]["held_out_ce"] = [4.0, 2.0, 1.75]
    compared = wallclock.compare(rows)
    assert [row["equal_ce"] for row in compared] == [1.5, 1.75, 1.5, 1.5, 1.5]
    assert [row["seconds_gain"] for row in compared] == pytest.approx([1, 40 / 60, 1, 2, 1])
    assert "1.5000 (with relu 1.7500), the equal time" in TABLES["wallclock"].notes(compared)


def test_what_is_missing_is_not_compared():
    rows = all_rows()
    for row in rows.values():
        del row["joules"], row["evaluated"]["joules"]
    compared = wallclock.compare(rows)
    assert "seconds_gain" in compared[0] and "joules_gain" not in compared[0]
    assert " kJ " not in TABLES["wallclock"].render(compared)
    del rows["relu"]
    compared = wallclock.compare(rows)
    assert [row["variant"] for row in compared] == [name for name in wallclock.RUNS if name in rows]
    assert compared[0]["seconds_gain"] == 1 and compared[0]["equal_ce"] == 1.5
    del rows["silu"]
    assert all("equal_ce" not in row for row in wallclock.compare(rows))


def test_runs_on_different_text_are_refused():
    with pytest.raises(wallclock.ConfigError, match=r"different text.*silu 6.500000, .*sparse 6.4"):
        wallclock.compare(all_rows(unigram_ce=6.4))
    wallclock.compare(all_rows(unigram_ce=6.5 + 1e-14))  # a sum in another order


def test_the_page_shows_clocks_and_gains(tmp_path, monkeypatch):
    record = {"benchmark": "wallclock", "device": "abacus", "date": "today", "commit": None,
              "versions": {"jax": "0"}, "command": "python -m x a=b --out somewhere",
              "rows": wallclock.compare(all_rows())}  # fmt: skip
    path, out = tmp_path / "wallclock-abacus.json", tmp_path / "pages"
    path.write_text(json.dumps(record))
    monkeypatch.setattr("sys.argv", ["render", str(path), "--out", str(out)])
    render.main()
    text = (out / "wallclock.md").read_text()
    assert ", jax 0: `python -m x a=b`.\n" in text
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert lines[1].startswith("| silu | 50 | 12 | 24 | 60 | 5.2 | 2 |")
    assert lines[4].endswith("| 1.0000 | 1.0000 | 1.0000 | 25 (2.00x) | 0.2 (4.00x) |")
    assert "The equal CE is 1.5000, the equal time 30 s, the equal energy 0.3 kJ." in text
    assert (out / "wallclock-abacus.png").read_bytes().startswith(b"\x89PNG")


def test_all_runs_see_the_same_tokens(text_settings):
    seen = []
    for changes in wallclock.RUNS.values():
        config = config_lib.load(wallclock.BASE, [*SETTINGS, *text_settings, *changes,
                                                  "data.tokenizer=byte", *_NO_TARGET])  # fmt: skip
        corpus = data.load(config)
        batches = iter(corpus.train)
        seen.append([*(next(batches)["tokens"] for _ in range(5)), corpus.held_out])
        batches.close()
    for others in zip(*seen, strict=True):
        assert np.all([np.array_equal(others[0], other) for other in others[1:]])


@pytest.mark.parametrize("name", ["silu", "relu", "silu, float8"])
def test_a_dense_twin_has_no_penalty_whatever_is_said_of_the_sparse_run(name):
    of_sparse = ["l1_coefficient=1", "union_target=0.5", "lasso_share=0.5", "skip_dead_every=10"]
    twin = config_lib.load(wallclock.BASE, [*SETTINGS, *of_sparse, *wallclock.RUNS[name]])
    assert not (twin.l1_coefficient or twin.targets or twin.lasso_share)
    assert not (twin.sparse_gradients_every or twin.skip_dead_every)


PROGRAM = """
import json, signal, sys, time
from pathlib import Path
def stop(*_):
    path.with_name("stopped").touch()
    sys.exit(int(sys.argv[2]))
signal.signal(signal.SIGTERM, stop)
path = Path(sys.argv[1])
for step in range(1, 400):
    with path.open("a") as log:
        log.write(json.dumps({"step": step, "seconds": 100.0 * step, "joules": None}) + "\\n")
    time.sleep(0.1)
"""


def test_a_run_is_stopped_once_it_has_trained_for_so_long(tmp_path):
    path = tmp_path / "metrics.jsonl"
    variants._run_for(300, "-c", PROGRAM, str(path), "0", run_dir=tmp_path)
    assert (tmp_path / "stopped").exists() and variants._trained_for(tmp_path) >= 300
    trained = variants._trained_for(tmp_path)
    variants._run_for(300, "-c", PROGRAM, str(path), "0", run_dir=tmp_path)  # has done so already
    assert variants._trained_for(tmp_path) == trained
    with pytest.raises(subprocess.CalledProcessError, match="status 7"):
        variants._run_for(trained + 1, "-c", PROGRAM, str(path), "7", run_dir=tmp_path)


@pytest.mark.slow
def test_a_record_is_complete_once_all_runs_are_there(
    tmp_path, monkeypatch, capsys, text_settings, reference_kernels, in_this_process
):
    small = [*SETTINGS, *text_settings, "data.tokenizer=byte", f"run_dir={tmp_path}/runs",
             *_NO_TARGET, "log_every=1", "eval_every=2", "sparse_gradients_every=9"]  # fmt: skip

    def run(*arguments):
        out = ["--out", str(tmp_path), "--seconds", "900"]
        monkeypatch.setattr("sys.argv", ["wallclock", *small, *out, *arguments])
        wallclock.main()
        (path,) = tmp_path.glob("wallclock-*.json")
        return path, json.loads(path.read_text())

    _, one = run("--run", "sparse")
    assert not one["complete"] and "equal_ce" not in one["rows"][0]
    path, content = run()
    assert content["complete"] and content["base"]["seconds"] == 900
    relu, sparse = (content["rows"][at] for at in (1, 3))
    assert sparse["logged"] == one["rows"][0]["logged"]  # not trained again
    assert [row["variant"] for row in content["rows"]] == list(wallclock.RUNS)
    for row in content["rows"]:
        assert row["logged"]["step"] == [1, 2, 3] and row["evaluated"]["step"] == [2, 3]
        assert row["tokens"] == 3 * 512 and "joules" not in row
        clock = np.array(row["logged"]["seconds"])
        assert clock[0] > 0 and np.all(np.diff(clock) > 0)
        assert row["equal_seconds"] <= row["evaluated"]["seconds"][-1]
    assert "l1_coefficient=0" in relu["settings"] and "l1_coefficient=0" not in sparse["settings"]
    with pytest.raises(SystemExit, match=r"seconds: .* was measured with 900.0, now 30.0"):
        run("--seconds", "30")
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["render", str(path)])
    render.main()
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(wallclock.RUNS)

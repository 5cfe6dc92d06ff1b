"""A run draws its plots at every evaluation, and a plot that fails never ends it."""

import jax
import pytest
from rich.console import Console

from tests.commands import call
from tests.train.runs import STEPS
from twell_jax import config
from twell_jax.train import metrics, plots
from twell_jax.train.result import redraw
from twell_jax.train.run_directory import RunPaths


@pytest.mark.slow
def test_plots_are_drawn_at_every_evaluation_and_may_fail(workspace, tmp_path, monkeypatch):
    evaluated = []

    def plot_run(settings, paths):
        evaluated.append([r["step"] for r in metrics.read(paths.metrics) if "held_out_ce" in r])
        raise OSError("disk full")

    monkeypatch.setattr(plots, "plot_run", plot_run)
    process = call("train.py", workspace / "config.yaml", f"run_dir={tmp_path / 'run'}")
    assert process.returncode == 0, process.stderr
    assert evaluated == [[25], [25, 50], [25, 50, STEPS]]
    assert process.stdout.count("warning: plots not drawn: OSError: disk full\n") == 3
    assert f"step {STEPS}/{STEPS}  ETA 0:00:00  held-out CE" in process.stdout


@pytest.mark.parametrize("process", [0, 1])
def test_only_the_first_process_draws(process, tmp_path, monkeypatch):
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(plots, "plot_run", lambda settings, paths: [paths.directory / "x.png"])
    drawn = redraw(config.load("tiny"), RunPaths(tmp_path), Console(quiet=True))
    assert len(drawn) == 1 - process

"""python train.py as a person runs it: what it shows and keeps, and what it refuses."""

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

from tests.commands import call, succeeded
from tests.runs.started import STEPS, final_state, records, stopped_at
from twell_jax import config
from twell_jax.train import metrics, plots
from twell_jax.train.run_directory import load_run


def train(*arguments):
    return call("train.py", *arguments)


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.mark.slow
def test_a_run_learns_and_shows_what_it_did(workspace, uninterrupted):
    directory = workspace / "run"
    text = uninterrupted.stdout
    assert f"step {STEPS}" in text
    assert text.count("bits/byte\n") == text.count("\nsample: '") == 3  # an evaluation's
    for word in ("mean nnz", "max nnz", "dead", "held-out CE", "unigram baseline"):
        assert word in text
    for plot in ("training.png", "layers.png"):
        assert (directory / plot).read_bytes().startswith(b"\x89PNG\r\n\x1a\n")
    lines = records(directory)
    training = [line for line in lines if "ce" in line]
    assert [line["step"] for line in training] == list(range(3, STEPS + 1, 3))
    assert [line["step"] for line in lines if "held_out_ce" in line] == [25, 50, 60]
    assert training[-1]["ce"] < 0.8 * training[0]["ce"]
    l1 = [0.5e-3 * min(line["step"] - 1, 20) for line in training]  # l1_warmup, before the update
    np.testing.assert_allclose([line["l1_coefficient"] for line in training], l1, rtol=1e-6)
    assert len(training[-1]["nnz"]) == 2
    assert training[-1]["tokens"] == 256 * STEPS
    assert {path.name for path in (directory / "checkpoints").iterdir()} == {"40", "50", "60"}
    stored = config.load(directory / "config.yaml")
    assert stored == config.load(workspace / "config.yaml")


@pytest.mark.slow
def test_plots_are_drawn_at_every_evaluation_and_may_fail(workspace, tmp_path, monkeypatch):
    evaluated = []

    def plot_run(settings, paths):
        evaluated.append([r["step"] for r in metrics.read(paths.metrics) if "held_out_ce" in r])
        raise OSError("disk full")

    monkeypatch.setattr(plots, "plot_run", plot_run)
    process = succeeded("train.py", workspace / "config.yaml", f"run_dir={tmp_path / 'run'}")
    assert evaluated == [[25], [25, 50], [25, 50, STEPS]]
    assert process.stdout.count("warning: plots not drawn: OSError: disk full\n") == 3
    assert f"step {STEPS}/{STEPS}  ETA 0:00:00  held-out CE" in process.stdout


@pytest.mark.slow
@pytest.mark.parametrize("named", ["config.yaml", "run"])
def test_a_finished_run_says_so(workspace, uninterrupted, named):
    before = final_state(workspace / "run"), records(workspace / "run")
    process = succeeded("train.py", workspace / named)
    assert process.stdout.startswith(f"finished {workspace / 'run'} at step {STEPS}")
    assert "held-out CE" in process.stdout
    assert (final_state(workspace / "run"), records(workspace / "run")) == before


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(workspace, tmp_path):
    # The first step has a learning rate of 0, the second one destroys the model.
    process = train(
        workspace / "config.yaml",
        f"run_dir={tmp_path / 'run'}",
        "optimizer.lr=1e30",
        "optimizer.warmup_steps=1",
        "checkpoint_every=1",
        "log_every=1",
    )
    assert process.returncode == 1
    assert "error: step 3: not finite: ce=" in process.stderr
    assert f"last good checkpoint: {tmp_path / 'run/checkpoints/1'}\n" in process.stderr
    assert "Traceback" not in process.stderr
    assert [line["step"] for line in records(tmp_path / "run")] == [1, 2]


@pytest.mark.slow
def test_a_run_with_another_model_is_refused(workspace, uninterrupted):
    before = contents(workspace / "run")
    process = train(workspace / "config.yaml", "model.d_ff=128")
    assert process.returncode == 3  # by which `make demo` knows that it must make room
    assert process.stderr.startswith("error: model.d_ff: the run in")
    assert "was started with 64, now 128" in process.stderr
    assert process.stderr.count("\n") == 1
    assert contents(workspace / "run") == before


@pytest.mark.slow
def test_a_dense_run_is_sparsified(workspace, tmp_path):
    configuration = workspace / "config.yaml"
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    silu = ["steps=10", "model.activation=silu", "l1_coefficient=0"]
    succeeded("train.py", configuration, f"run_dir={dense}", *silu)
    with stopped_at(1):  # the learning rate of the first step is 0
        first = succeeded("train.py", configuration, f"run_dir={sparse}", f"init_from={dense}")
    assert "stopped at step 1;" in first.stdout
    before, after = (nnx.state(load_run(directory)[2]) for directory in (dense, sparse))
    for ours, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_array_equal(ours, theirs)

    refused = train(configuration, f"run_dir={sparse}2", f"init_from={dense}", "model.d_ff=128")
    assert refused.returncode == 1
    assert "model.d_ff: 128, but init_from" in refused.stderr
    refused = train(configuration, f"run_dir={sparse}3", f"init_from={tmp_path / 'none'}")
    assert refused.returncode == 1
    assert f"init_from: '{tmp_path / 'none'}': there is no such directory" in refused.stderr


def test_a_foreign_directory_is_refused(workspace, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    process = train(workspace / "config.yaml", f"run_dir={tmp_path}")
    assert process.returncode == 1
    assert process.stderr.startswith(f"error: run_dir: {tmp_path} is not the directory of a run")
    assert process.stderr.count("\n") == 1
    assert contents(tmp_path) == before


def test_print_config_is_a_config(workspace, tmp_path):
    process = succeeded(
        "train.py", workspace / "config.yaml", "--print-config", "steps=7", "optimizer.lr=1e-3"
    )
    (tmp_path / "printed.yaml").write_text(process.stdout)
    expected = config.load(workspace / "config.yaml", ["steps=7", "optimizer.lr=1e-3"])
    assert config.load(tmp_path / "printed.yaml") == expected


def test_help_explains_every_key(workspace):
    process = succeeded("train.py", workspace / "config.yaml", "--help")
    assert process.stdout.startswith("usage: train.py ")
    assert "python train.py configs/tiny.yaml [key=value ...]" in process.stdout
    assert config.describe() in process.stdout


@pytest.mark.parametrize("name", ["tiny", "configs/tiny.yaml"])
def test_the_package_is_the_same_command_and_knows_its_configurations(name, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    process = succeeded("-m", "twell_jax.train", name, "--print-config", "steps=7")
    (tmp_path / "printed.yaml").write_text(process.stdout)
    assert config.load(tmp_path / "printed.yaml") == config.load("tiny", ["steps=7"])
    usage = call("-m", "twell_jax.train", "--help").stdout
    assert usage.startswith("usage: python -m twell_jax.train ")


def test_an_unknown_configuration_is_one_line_that_names_those_there_are():
    process = train("tyni")
    assert process.returncode == 1
    assert process.stderr == (
        "error: tyni: cannot be read (no such file); the shipped configurations are "
        "0p5b, 1b, 1p5b, 2b, sparsify, tiny\n"
    )


def test_without_a_configuration_the_shipped_ones_are_named():
    for arguments in ([], ["lr=1"]):
        process = train(*arguments)
        assert process.returncode == 2
        assert "no configuration is named; shipped are 0p5b, 1b, 1p5b, 2b, " in process.stderr


@pytest.mark.parametrize("name", ["moved", "lr=0.1"])
def test_the_directory_of_a_run_names_its_configuration(tmp_path, name):
    moved = tmp_path / name
    moved.mkdir()
    refused = train(moved)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {moved}: a directory without a run (config.yaml); ")
    assert refused.stderr.count("\n") == 1
    expected = config.load("tiny", [f"run_dir={moved}", "steps=7"])
    written = expected.model_dump(mode="json") | {"run_dir": "where it was"}
    written["model"]["ffn_gradient_capacity"] = 0.5  # of version 0.2
    (moved / "config.yaml").write_text(yaml.safe_dump(written))
    shown = train(moved, "--print-config", "steps=8")
    assert shown.stdout == config.to_yaml(expected.model_copy(update={"steps": 8}))


def test_a_wrong_key_is_one_line(workspace):
    process = train(workspace / "config.yaml", "stepz=7")
    assert process.returncode == 1
    assert process.stderr.startswith("error: stepz: unknown key; did you mean steps?")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
def test_dry_run_estimates_the_memory_of_a_mesh(workspace, tmp_path, monkeypatch):
    monkeypatch.setattr(jax.config, "update", lambda *_: None)  # this process has its devices

    def gibibytes(*arguments):
        process = succeeded(
            "train.py", workspace / "config.yaml", f"run_dir={tmp_path / 'run'}", *arguments
        )
        assert "0.001 billion parameters" in process.stdout
        return float(process.stdout.split(" GiB state")[0].split()[-1])

    shape = ("model.d_model=128", "model.d_ff=1024", "micro_batch=1")
    whole = gibibytes("--dry-run", "1", *shape)
    split = gibibytes("--dry-run", "8", "mesh.fsdp=8", *shape)
    assert split < 0.3 * whole
    assert not (tmp_path / "run").exists()

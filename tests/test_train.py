"""python train.py as a person runs it, kills it, and starts it again."""

import contextlib
import io
import json
import os
import random
import runpy
import shutil
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np
import pytest
import yaml
from flax import nnx

import train
from twell_jax import config, distributed, metrics, sharding
from twell_jax.checkpoint import Checkpoints
from twell_jax.ffn import CannotServe
from twell_jax.run import load_run
from twell_jax.training import abstract_state, make_trainer

ROOT = Path(__file__).parents[1]
STEPS = 60

# Runs train.py again and again, each time with a call that kills the process at an exact point:
# each of argv[1:] before "train.py" names a function and how often it is to be called before, the
# rest is the command line. Forks, so that all is imported once; no backend has started by then.
KILL_AT = """
import importlib, os, runpy, signal, sys
import train
end = sys.argv.index("train.py")
points, sys.argv = sys.argv[1:end], sys.argv[end:]
def prepare(point):
    where, calls = point.split("*")
    module, *owner, name = where.split(":")
    target = importlib.import_module(module)
    for part in owner:
        target = getattr(target, part)
    original, count = getattr(target, name), 0
    def wrapped(*args, **kwargs):
        nonlocal count
        count += 1
        if count > int(calls):
            if name == "write":  # half a line of metrics.jsonl
                args[0]._file.write('{"step": ')
                args[0]._file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
        return original(*args, **kwargs)
    setattr(target, name, wrapped)
for point in points:
    child = os.fork()
    if child == 0:
        prepare(point)
        runpy.run_path("train.py", run_name="__main__")
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        sys.exit(f"{point}: ended with {status}")
"""

# Runs train.py in a process that, if it is the second, cannot read the checkpoint of step argv[1].
CANNOT_READ = """
import os, runpy, sys
import orbax.checkpoint as ocp
step, *sys.argv = sys.argv[1:]
restore = ocp.Checkpointer.restore
def restore_or_fail(reader, directory, **kwargs):
    if directory.name == step and os.environ["JAX_PROCESS_ID"] == "1":
        raise OSError("stale file handle")
    return restore(reader, directory, **kwargs)
ocp.Checkpointer.restore = restore_or_fail
runpy.run_path("train.py", run_name="__main__")
"""


@pytest.fixture(scope="module")
def workspace(tmp_path_factory):
    """A directory with a small corpus, a configuration and caches that all runs share."""
    directory = tmp_path_factory.mktemp("train")
    draw = random.Random()
    (directory / "corpus").mkdir()
    for i in range(60):
        words = draw.choices(["alpha", "beta", "gamma", "delta", "epsilon"], k=100)
        (directory / f"corpus/{i}.txt").write_text(" ".join(words))
    settings = {
        "run_dir": str(directory / "run"),
        "steps": STEPS,
        "batch_tokens": 256,
        "micro_batch": 4,
        "l1_coefficient": 1e-2,
        "l1_warmup": [0, 20],
        "dead_window_tokens": 2560,
        "reinit_every": 5,
        "eval_every": 25,
        "eval_sequences": 5,
        "checkpoint_every": 10,
        "log_every": 3,
        "model": {
            "vocab_size": 257, "context": 32, "d_model": 32, "layers": 2, "heads": 2, "d_ff": 64,
            "dtype": "float32",
        },
        "data": {
            "source": "files",
            "paths": [str(directory / "corpus/*.txt")],
            "held_out_fraction": 0.2,
            "mask_documents": True,
            "cache_dir": str(directory / "tokens"),
        },
        "optimizer": {"lr": 3e-3, "warmup_steps": 5},
    }  # fmt: skip
    (directory / "config.yaml").write_text(yaml.safe_dump(settings))
    return directory


def start(workspace, *arguments, before=("train.py",), **variables):
    environment = os.environ | {
        "JAX_PLATFORMS": "cpu",
        "JAX_COMPILATION_CACHE_DIR": str(workspace / "jax"),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
        **variables,
    }
    command = [sys.executable, *before, str(workspace / "config.yaml"), *arguments]
    return subprocess.Popen(
        command,
        cwd=ROOT,
        env=environment,
        text=True,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )


def finish(process):
    output, errors = process.communicate(timeout=120)
    return subprocess.CompletedProcess(process.args, process.returncode, output, errors)


def run(workspace, *arguments, **options):
    return finish(start(workspace, *arguments, **options))


def call(workspace, *arguments):
    """As `run`, in this process: for what ends before a model is made."""
    output, errors, code = io.StringIO(), io.StringIO(), 0
    on_sigterm = signal.getsignal(signal.SIGTERM)
    with (
        pytest.MonkeyPatch.context() as patch,
        contextlib.redirect_stdout(output),
        contextlib.redirect_stderr(errors),
    ):
        patch.setattr("sys.argv", ["train.py", str(workspace / "config.yaml"), *arguments])
        patch.setattr("logging.basicConfig", lambda **_: None)
        try:
            runpy.run_path(str(ROOT / "train.py"), run_name="__main__")
        except SystemExit as end:
            code = end.code or 0
            if isinstance(code, str):
                print(code, file=sys.stderr)
                code = 1
        finally:
            signal.signal(signal.SIGTERM, on_sigterm)
    return subprocess.CompletedProcess(arguments, code, output.getvalue(), errors.getvalue())


def records(run_dir):
    """Lines of metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    return [{k: v for k, v in line.items() if k != "tokens_per_second"} for line in lines]


def final_state(run_dir):
    """All arrays of the newest checkpoint, as bytes, and the position in the data."""
    run = config.load(run_dir / "config.yaml")
    mesh = sharding.make_mesh(run.mesh, jax.devices("cpu")[:1])
    with Checkpoints(run_dir / "checkpoints", run.checkpoint_keep) as checkpoints:
        state, position = checkpoints.restore(abstract_state(run, mesh))
    assert state.step == STEPS
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], position


def assert_same_result(run_dir, expected_dir):
    assert final_state(run_dir) == final_state(expected_dir)
    assert records(run_dir) == records(expected_dir)
    assert not list(run_dir.rglob("*tmp*"))


def contents(directory):
    return {path: path.read_bytes() for path in directory.rglob("*") if path.is_file()}


@pytest.fixture(scope="module")
def uninterrupted(workspace):
    process = run(workspace)
    assert process.returncode == 0, process.stderr
    return process


@pytest.mark.slow
def test_a_run_learns_and_shows_what_it_did(workspace, uninterrupted):
    directory = workspace / "run"
    text = uninterrupted.stdout
    assert f"step {STEPS}" in text
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
def test_a_finished_run_says_so(workspace, uninterrupted):
    before = final_state(workspace / "run"), records(workspace / "run")
    process = run(workspace)
    assert process.returncode == 0
    assert process.stdout.startswith(f"finished {workspace / 'run'} at step {STEPS}")
    assert "held-out CE" in process.stdout
    assert (final_state(workspace / "run"), records(workspace / "run")) == before


@pytest.mark.slow
def test_killed_again_and_again_it_ends_with_the_same_bits(workspace, uninterrupted, tmp_path):
    run_dir = tmp_path / "killed"

    def kill_at(*points):
        process = run(workspace, f"run_dir={run_dir}", before=("-c", KILL_AT, *points, "train.py"))
        assert process.returncode == 0, process.stderr

    kill_at(
        "pathlib:Path:replace*0",  # its config.yaml is written, but not yet named so
        "twell_jax.metrics:Recorder:add*7",  # no checkpoint yet
        "twell_jax.checkpoint:ocp:CheckpointManager:save*0",  # at the first checkpoint
        "twell_jax.metrics:Recorder:add*12",  # two steps after it
        "twell_jax.metrics:Log:write*1",  # in the middle of a line
        "twell_jax.metrics:Recorder:add_evaluation*1",  # step 50: logged, but not yet evaluated
        "os:rename*2",  # a checkpoint is written, but not yet named so
    )
    assert list(run_dir.glob("checkpoints/*tmp*"))
    kill_at("twell_jax.plots:plot_run*0")  # trained, but nothing shown
    process = run(workspace, f"run_dir={run_dir}")
    assert process.returncode == 0, process.stderr
    assert_same_result(run_dir, workspace / "run")


@pytest.mark.slow
def test_killed_while_a_checkpoint_is_written(workspace, uninterrupted, tmp_path):
    checkpoints = tmp_path / "killed/checkpoints"
    for _ in range(3):
        process, seen = start(workspace, f"run_dir={tmp_path / 'killed'}"), None
        while process.poll() is None and seen is None:
            names = os.listdir(checkpoints) if checkpoints.exists() else []
            seen = next((name for name in names if "tmp" in name), None)
        process.kill()
        finish(process)
    process = run(workspace, f"run_dir={tmp_path / 'killed'}")
    assert process.returncode == 0, process.stderr
    assert_same_result(tmp_path / "killed", workspace / "run")


@pytest.mark.slow
def test_sigterm_saves_and_exits_with_0(workspace, uninterrupted, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(workspace, f"run_dir={run_dir}")
    while process.poll() is None and not (
        (run_dir / "metrics.jsonl").exists() and records(run_dir)
    ):
        time.sleep(0.001)
    process.terminate()
    process = finish(process)
    assert process.returncode == 0, process.stderr
    (step,) = (int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert 3 <= step < STEPS
    assert f"stopped at step {step}; the same command continues" in process.stdout
    process = run(workspace, f"run_dir={run_dir}")
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"continuing {run_dir} at step {step}")
    assert_same_result(run_dir, workspace / "run")


@pytest.mark.slow
def test_a_loss_that_is_not_finite_stops_the_run(workspace, tmp_path):
    # The first step has a learning rate of 0, the second one destroys the model.
    process = run(
        workspace,
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
    process = call(workspace, "model.d_ff=128")
    assert process.returncode == 1
    assert process.stderr.startswith("error: model.d_ff: the run in")
    assert "was started with 64, now 128" in process.stderr
    assert process.stderr.count("\n") == 1
    assert contents(workspace / "run") == before


def start_two(workspace, *arguments, **options):
    """Two processes with two devices each."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    return [
        start(
            workspace,
            *arguments,
            "micro_batch=1",
            JAX_NUM_CPU_DEVICES="2",
            JAX_COORDINATOR_ADDRESS=f"localhost:{port}",
            JAX_NUM_PROCESSES="2",
            JAX_PROCESS_ID=str(index),
            **options,
        )
        for index in range(2)
    ]


def wait_for_step(run_dir, step, processes):
    while not any(line["step"] > step for line in metrics.read(run_dir / "metrics.jsonl")):
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)


@pytest.mark.slow
def test_processes_come_and_go_and_the_result_is_that_of_one_device(workspace, tmp_path):
    # Adam's first step for a neuron is as large as any: at a usual learning rate, rounding that
    # lets one fire a step earlier grows to 1e-2 within 30 steps.
    calm = ["optimizer.lr=1e-6", "reinit_every=0"]
    one, several = tmp_path / "one", tmp_path / "several"
    reference = start(workspace, f"run_dir={one}", *calm)
    arguments = [f"run_dir={several}", *calm, "mesh.heartbeat_seconds=10"]

    processes = start_two(workspace, *arguments, "mesh.fsdp=4")
    wait_for_step(several, 12, processes)
    processes[1].kill()
    first, _ = map(finish, processes)
    assert first.returncode == 1
    assert "another process was lost. The same command on all hosts continues" in first.stderr

    processes = start_two(workspace, *arguments, "mesh.fsdp=2")
    wait_for_step(several, 15, processes)
    processes[1].terminate()
    first, second = map(finish, processes)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert f"continuing {several} at step 10" in first.stdout
    assert "; the same command continues" in first.stdout
    assert "step" not in second.stdout

    last = run(workspace, *arguments, "micro_batch=1", JAX_NUM_CPU_DEVICES="8")
    assert last.returncode == 0, last.stderr
    reference = finish(reference)
    assert reference.returncode == 0, reference.stderr
    assert final_state(several)[1] == final_state(one)[1]
    found, expected = records(several), records(one)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, right in zip(found, expected, strict=True):
        for name in {"ce", "l1", "held_out_ce"} & set(right):
            np.testing.assert_allclose(line[name], right[name], rtol=1e-5, err_msg=name)


@pytest.mark.slow
def test_processes_continue_from_what_all_can_read(workspace, uninterrupted, tmp_path):
    run_dir = shutil.copytree(workspace / "run", tmp_path / "run")
    before = "-c", CANNOT_READ, str(STEPS), "train.py"
    processes = start_two(workspace, f"run_dir={run_dir}", before=before)
    first, second = map(finish, processes)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert f"continuing {run_dir} at step 50" in first.stdout
    assert "step 60: another process cannot read it" in first.stderr
    assert "step 60: OSError: stale file handle" in second.stderr
    assert (run_dir / "checkpoints/60.broken").exists()
    final_state(run_dir)


@pytest.mark.parametrize(
    ("variables", "message"),
    [
        ({"JAX_NUM_PROCESSES": "2"}, "JAX_PROCESS_ID must be numbers"),
        ({"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "2"}, "must be below JAX_NUM_PROCESSES=2"),
    ],
)
def test_a_wrong_launch_is_one_line(monkeypatch, variables, message):
    monkeypatch.setenv("JAX_COORDINATOR_ADDRESS", "localhost:1")
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(config.ConfigError, match=message):
        distributed.initialize(10)


def test_a_dense_run_is_sparsified(workspace, tmp_path):
    dense, sparse = tmp_path / "dense", tmp_path / "sparse"
    silu = ["steps=10", "model.activation=silu", "l1_coefficient=0"]
    assert run(workspace, f"run_dir={dense}", *silu).returncode == 0
    first = [f"run_dir={sparse}", f"init_from={dense}", "steps=1", "optimizer.lr=1e-9"]
    assert run(workspace, *first).returncode == 0
    before, after = (nnx.state(load_run(directory)[2]) for directory in (dense, sparse))
    for ours, theirs in zip(jax.tree.leaves(before), jax.tree.leaves(after), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)

    refused = run(workspace, f"run_dir={sparse}2", f"init_from={dense}", "model.d_ff=128")
    assert refused.returncode == 1
    assert "model.d_ff: 128, but init_from" in refused.stderr
    refused = run(workspace, f"run_dir={sparse}3", f"init_from={tmp_path / 'none'}")
    assert refused.returncode == 1 and "is not the directory of a run" in refused.stderr


def test_a_foreign_directory_is_refused(workspace, tmp_path):
    (tmp_path / "thesis.tex").write_text("years of work")
    before = contents(tmp_path)
    process = call(workspace, f"run_dir={tmp_path}")
    assert process.returncode == 1
    assert process.stderr.startswith(f"error: run_dir: {tmp_path} is not the directory of a run")
    assert process.stderr.count("\n") == 1
    assert contents(tmp_path) == before


def test_print_config_is_a_config(workspace, tmp_path):
    process = call(workspace, "--print-config", "steps=7", "optimizer.lr=1e-3")
    assert process.returncode == 0
    (tmp_path / "printed.yaml").write_text(process.stdout)
    expected = config.load(workspace / "config.yaml", ["steps=7", "optimizer.lr=1e-3"])
    assert config.load(tmp_path / "printed.yaml") == expected


def test_help_explains_every_key(workspace):
    process = call(workspace, "--help")
    assert process.returncode == 0
    assert "python train.py configs/tiny.yaml [key=value ...]" in process.stdout
    assert config.describe() in process.stdout


def test_a_wrong_key_is_one_line(workspace):
    process = run(workspace, "stepz=7")
    assert process.returncode == 1
    assert process.stderr.startswith("error: stepz: unknown key; did you mean steps?")
    assert process.stderr.count("\n") == 1


@pytest.mark.slow
def test_dry_run_estimates_the_memory_of_a_mesh(workspace, tmp_path):
    def gibibytes(*arguments):
        process = run(workspace, f"run_dir={tmp_path / 'run'}", *arguments)
        assert process.returncode == 0, process.stderr
        assert "0.001 billion parameters" in process.stdout
        return float(process.stdout.split(" GiB state")[0].split()[-1])

    shape = ("model.d_model=128", "model.d_ff=1024", "micro_batch=1")
    whole = gibibytes("--dry-run", "1", *shape)
    split = gibibytes("--dry-run", "8", "mesh.fsdp=8", *shape)
    assert split < 0.3 * whole
    assert not (tmp_path / "run").exists()


def test_sparse_gradients_that_cannot_be_computed_are_refused_before_training():
    settings = config.load(ROOT / "configs/tiny.yaml", ["sparse_gradients_every=10"])
    trainer = make_trainer(settings, 0, sharding.make_mesh(settings.mesh, jax.devices("cpu")[:1]))
    with pytest.raises(CannotServe, match="'mosaic' cannot serve"):
        train.first_choice(settings, trainer)

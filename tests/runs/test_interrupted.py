"""Runs that are killed, stopped or lose a process, and are started again."""

import contextlib
import random
import signal
import socket
import time

import numpy as np
import pytest

from tests.commands import succeeded
from tests.runs.started import STEPS, final_state, finish, records, run, start
from twell_jax import config
from twell_jax.train import distributed

# Runs train.py again and again; each time a call kills the process at an exact point. Each of
# argv[1:] before "train.py" names a function and how many calls of it succeed; the rest is the
# command line, of which the last word names the run. It forks, so that all is imported once; no
# backend has started by then. Says what the run's checkpoints are.
KILL_AT = """
import os, runpy, signal, sys
import twell_jax.train.command, twell_jax.train.plots
from tests.runs.after_calls import after_calls
end = sys.argv.index("train.py")
points, sys.argv = sys.argv[1:end], sys.argv[end:]
checkpoints = sys.argv[-1].removeprefix("run_dir=") + "/checkpoints"
def kill_at(point):
    where, calls = point.split("*")
    def kill(*args):
        if where.endswith(":write"):  # half a line of metrics.jsonl
            args[0]._file.write('{"step": ')
            args[0]._file.flush()
        os.kill(os.getpid(), signal.SIGKILL)
    after_calls(where, int(calls), kill)
for point in points:
    child = os.fork()
    if child == 0:
        kill_at(point)
        runpy.run_path("train.py", run_name="__main__")
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if status != -signal.SIGKILL:
        sys.exit(f"{point}: ended with {status}")
    print(point, os.listdir(checkpoints) if os.path.exists(checkpoints) else [], flush=True)
"""

# Runs train.py in a process that, if it is the second, cannot read the checkpoint of step argv[1],
# reads other digests from that of argv[2], and has its third batch argv[3] seconds late.
HANDICAPPED = """
import runpy, signal, sys, time
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of some shells
import jax
import orbax.checkpoint as ocp
from twell_jax.train.trainer import Trainer
unreadable, stale, seconds, *sys.argv = sys.argv[1:]
restore, put_batch, calls = ocp.Checkpointer.restore, Trainer.put_batch, 0
def restore_or_fail(reader, directory, **kwargs):
    if directory.name == unreadable and jax.process_index() == 1:
        raise OSError("stale file handle")
    restored = restore(reader, directory, **kwargs)
    if directory.name == stale and jax.process_index() == 1:
        restored["digests"]["arrays"]["step"] = "another"
    return restored
def put_late(trainer, tokens):
    global calls
    calls += 1
    if calls == 3 and jax.process_index() == 1:
        time.sleep(float(seconds))
        print("late", file=sys.stderr)
    return put_batch(trainer, tokens)
ocp.Checkpointer.restore, Trainer.put_batch = restore_or_fail, put_late
runpy.run_path("train.py", run_name="__main__")
"""


def assert_same_result(run_dir, expected_dir):
    assert final_state(run_dir) == final_state(expected_dir)
    assert records(run_dir) == records(expected_dir)
    assert not list(run_dir.rglob("*tmp*"))


POINTS = [
    "pathlib:Path:replace*0",  # its config.yaml is written, but not yet named so
    "twell_jax.train.checkpoint:ocp:CheckpointManager:save*0",  # at the first: there is none
    "twell_jax.train.metrics:Log:write*4",  # after a checkpoint, in the middle of a line
    "twell_jax.train.metrics:Recorder:add_evaluation*1",  # step 50: logged, not evaluated
    "os:rename*2",  # a checkpoint is written, but not yet named so
    "twell_jax.train.loop:show_result*0",  # trained, but nothing shown
]


@pytest.mark.slow
@pytest.mark.parametrize("points", [POINTS[4:5], POINTS])
def test_killed_again_and_again_it_ends_with_the_same_bits(
    workspace, uninterrupted, tmp_path, points
):
    run_dir = tmp_path / "killed"
    before = "-c", KILL_AT, *points, "train.py"
    process = run(workspace, f"run_dir={run_dir}", before=before)
    assert process.returncode == 0, process.stderr
    left = dict(line.split(" ", 1) for line in process.stdout.splitlines() if line[-1:] == "]")
    assert "tmp" in left["os:rename*2"], left
    process = succeeded("train.py", workspace / "config.yaml", f"run_dir={run_dir}")
    assert_same_result(run_dir, workspace / "run")


@pytest.mark.slow
def test_sigterm_saves(workspace, uninterrupted, tmp_path):
    run_dir = tmp_path / "stopped"
    process = start(workspace, f"run_dir={run_dir}")
    while process.poll() is None and not (
        (run_dir / "metrics.jsonl").exists() and records(run_dir)
    ):
        time.sleep(0.01)
    process.terminate()
    process = finish(process)
    assert process.returncode == 0, process.stderr
    (step,) = (int(path.name) for path in (run_dir / "checkpoints").iterdir())
    assert 3 <= step < STEPS
    assert f"stopped at step {step}; the same command continues" in process.stdout

    process = succeeded("train.py", workspace / "config.yaml", f"run_dir={run_dir}")
    assert process.stdout.startswith(f"continuing {run_dir} at step {step}")
    assert_same_result(run_dir, workspace / "run")


def by_hand(port, index):
    return {
        "JAX_COORDINATOR_ADDRESS": f"localhost:{port}",
        "JAX_NUM_PROCESSES": "2",
        "JAX_PROCESS_ID": str(index),
    }


def by_srun(port, index):
    """What `srun -n 2` sets; JAX takes the port from the job's number, in the last 4096."""
    return {
        "SLURM_JOB_ID": str(port),
        "SLURM_STEP_NODELIST": "localhost",
        "SLURM_NTASKS": "2",
        "SLURM_STEP_NUM_TASKS": "2",
        "SLURM_PROCID": str(index),
        "SLURM_LOCALID": str(index),
    }


def start_two(workspace, *arguments, launched=by_hand, **options):
    """Two processes with two devices each; each device has half of two models."""
    with socket.socket() as free:
        for port in random.sample(range(2**16 - 2**12, 2**16), 100):
            with contextlib.suppress(OSError):
                free.bind(("localhost", port))
                break
    return [
        start(
            workspace,
            *arguments,
            "micro_batch=1",
            "mesh.fsdp=2",
            JAX_NUM_CPU_DEVICES="2",
            **launched(port, index),
            **options,
        )
        for index in range(2)
    ]


def wait_for(path, processes):
    while not path.exists():
        assert all(process.poll() is None for process in processes)
        time.sleep(0.01)


@pytest.mark.slow
def test_processes_come_and_go_and_the_result_is_that_of_one_device(workspace, tmp_path):
    # Adam's first step for a neuron is as large as any: at a usual learning rate, rounding that
    # lets one be active a step earlier grows to 1e-2 within 30 steps.
    calm = ["steps=20", "checkpoint_every=4", "optimizer.lr=1e-6", "reinit_every=0"]
    one, several = tmp_path / "one", tmp_path / "several"
    succeeded("train.py", workspace / "config.yaml", f"run_dir={one}", *calm)
    arguments = [f"run_dir={several}", *calm, "mesh.heartbeat_seconds=10"]

    processes = start_two(workspace, *arguments)
    wait_for(several / "checkpoints/12", processes)
    processes[1].kill()
    first, _ = map(finish, processes)
    assert "2 processes: if one is lost, the others end within 10 s; the same" in first.stdout
    if first.returncode == 1:  # it was in a collective, which raised an exception
        assert "another process was lost. The same command on all hosts continues" in first.stderr
    else:  # it was waiting to end a checkpoint, where JAX ends a process itself
        assert first.returncode == -signal.SIGABRT
        assert "This most likely indicates that another task died" in first.stderr

    names = [path.name for path in (several / "checkpoints").iterdir()]
    *_, readable, stale, unreadable = sorted(int(name) for name in names if name.isdecimal())
    # Late for longer than the others wait for a lost process.
    before = "-c", HANDICAPPED, str(unreadable), str(stale), "12", "train.py"
    processes = start_two(workspace, *arguments, launched=by_srun, before=before)
    for step in (unreadable, stale):
        wait_for(several / f"checkpoints/{step}.broken", processes)
    processes[1].send_signal(signal.SIGINT)
    first, second = map(finish, processes)
    assert first.returncode == second.returncode == 0, first.stderr + second.stderr
    assert f"continuing {several} at step {readable}" in first.stdout
    for step in (unreadable, stale):
        assert f"step {step}: another process cannot restore it" in first.stderr
    assert f"step {unreadable}: OSError: stale file handle" in second.stderr
    assert f"step {stale}: CheckpointError: not as saved: step" in second.stderr
    assert "late" in second.stderr.split()
    assert "; the same command continues" in first.stdout
    assert "step" not in second.stdout

    succeeded("train.py", workspace / "config.yaml", *arguments)
    assert final_state(several, 20)[1] == final_state(one, 20)[1]
    found, expected = records(several), records(one)
    assert [line["step"] for line in found] == [line["step"] for line in expected]
    for line, right in zip(found, expected, strict=True):
        for name in {"ce", "l1", "held_out_ce"} & set(right):
            np.testing.assert_allclose(line[name], right[name], rtol=1e-5, err_msg=name)


@pytest.mark.parametrize(
    ("address", "count", "index", "message"),
    [
        ("localhost:1", "2", None, "JAX_PROCESS_ID must be numbers"),
        ("localhost:1", "2", "2", "must be below JAX_NUM_PROCESSES=2"),
        ("localhost", "2", "0", "must be the host:port of process 0, .*, got 'localhost'"),
        ("localhost:x", "2", "0", "must be the host:port of process 0"),
        (None, "2", "1", "need JAX_COORDINATOR_ADDRESS"),
        (None, None, "1", "need JAX_COORDINATOR_ADDRESS"),
    ],
)
def test_a_wrong_launch_is_one_line(monkeypatch, address, count, index, message):
    names = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
    for name, value in zip(names, (address, count, index), strict=True):
        monkeypatch.delenv(name, raising=False)
        if value:
            monkeypatch.setenv(name, value)
    with pytest.raises(config.ConfigError, match=message):
        distributed.initialize(10)

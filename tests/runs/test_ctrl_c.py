"""Ctrl-C: a run saves and stops; where there is nothing to save, every command ends at once."""

import json
import os
import signal
import subprocess
import sys
import threading

import pytest

from tests.commands import call, succeeded
from tests.runs.started import ROOT
from twell_jax.train import interrupt
from twell_jax.train.metrics import Recorder

# Runs commands, each in a process that has imported everything. After so many calls of a function,
# Ctrl-C is pressed once or twice, the last time while a library computes for minutes, as XLA does
# when it compiles. Says how each command ended.
PRESS = """
import hashlib, importlib, json, os, signal, sys, time
import twell_jax.analyze, twell_jax.generate, twell_jax.train.command
from tests.runs.after_calls import after_calls
signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored in jobs of some shells
def press_at(where, calls, presses):
    def press(*args):
        for i in range(presses):
            time.sleep(i)
            os.kill(os.getpid(), signal.SIGINT)
        hashlib.pbkdf2_hmac("sha256", b"", b"", 10**10)
    after_calls(where, calls, press)
for point, module, *arguments in json.loads(sys.argv[1]):
    child = os.fork()
    if child == 0:
        signal.alarm(60)
        press_at(*point)
        sys.argv = [module, *arguments]
        importlib.import_module(module).main()
        sys.exit()
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print("ended with", status, file=sys.stderr, flush=True)
"""


@pytest.mark.slow
def test_ctrl_c_ends_at_once_where_nothing_is_to_be_saved_and_when_repeated(workspace, tmp_path):
    run_dir = tmp_path / "run"
    train = "twell_jax.train.command", str(workspace / "config.yaml"), f"run_dir={run_dir}"
    model = "twell_jax.inference.language_model"
    commands = [
        [("twell_jax.data:load", 0, 1), *train],
        [("twell_jax.train.trainer:Trainer:put_batch", 0, 1), *train],  # before the first step
        [("twell_jax.train.trainer:Trainer:put_batch", 11, 2), *train],  # after a checkpoint
        [("twell_jax.analyze:load_run", 0, 1), "twell_jax.analyze", str(run_dir)],
        [(f"{model}:load", 0, 1), "twell_jax.generate", str(run_dir), "--prompt", "a"],
    ]
    process = subprocess.run(
        [sys.executable, "-c", PRESS, json.dumps(commands)],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        text=True,
        capture_output=True,
        timeout=200,
    )
    nothing_taken = "stopped before a step was taken; the same command continues"
    said = [line for line in process.stderr.splitlines() if not line.startswith("INFO ")]
    assert said == [
        *(nothing_taken, "ended with 130"),
        *(nothing_taken, "ended with 130"),
        "stopping after this step, to save it; Ctrl-C again stops at once",
        *("stopped; the same command continues from the last checkpoint", "ended with 130"),
        *("interrupted", "ended with 130"),
        *("interrupted", "ended with 130"),
    ]
    assert (run_dir / "checkpoints/10").exists()


def test_a_signal_that_the_process_ignores_stays_ignored():
    before = signal.signal(signal.SIGINT, signal.SIG_IGN)
    try:
        with interrupt.handled({signal.SIGINT: lambda: None, signal.SIGTERM: lambda: None}):
            assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
            assert callable(signal.getsignal(signal.SIGTERM))
        assert signal.getsignal(signal.SIGINT) == signal.SIG_IGN
    finally:
        signal.signal(signal.SIGINT, before)


def test_ctrl_c_saves_and_exits_with_0(workspace, tmp_path, monkeypatch, capfd):
    add, say, heard = Recorder.add, interrupt.say, threading.Event()

    def add_and_press(recorder, step, *measured):
        add(recorder, step, *measured)
        if step == 7:
            os.kill(os.getpid(), signal.SIGINT)
            assert heard.wait(timeout=60)  # by a thread

    monkeypatch.setattr(Recorder, "add", add_and_press)
    monkeypatch.setattr(interrupt, "say", lambda line: (say(line), heard.set()))
    # Ignored where the tests are a shell's background job.
    ignored = signal.signal(signal.SIGINT, signal.default_int_handler)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    command = "train.py", workspace / "config.yaml", f"run_dir={tmp_path / 'run'}"
    stopped = succeeded(*command)
    (saved,) = (tmp_path / "run/checkpoints").iterdir()
    assert 7 <= int(saved.name) < 10  # without it, the first checkpoint is at 10
    # It may yet wait for what was being compiled.
    assert f"\nstopped at step {saved.name}; the same command continues\n" in stopped.stdout
    said = "stopping after this step, to save it; Ctrl-C again stops at once\n"
    assert capfd.readouterr().err == said
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    signal.signal(signal.SIGINT, ignored)
    continued = call(*command, f"steps={saved.name}")
    assert continued.stdout.startswith(f"finished {tmp_path / 'run'} at step {saved.name}")

"""Runs of train.py, as a person starts them, and what they leave."""

import contextlib
import json
import os
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest

from twell_jax import config
from twell_jax.models import sharding
from twell_jax.train import distributed
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.state import abstract_state

ROOT = Path(__file__).parents[2]
STEPS = 60


def start(workspace, *arguments, before=("train.py",), **variables):
    environment = os.environ | {"JAX_PLATFORMS": "cpu", **variables}
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


@contextlib.contextmanager
def stopped_at(step):
    """Runs of this process are asked to stop there."""
    with pytest.MonkeyPatch.context() as patch:
        request = contextlib.nullcontext(lambda done: done == step)
        patch.setattr(distributed, "stop_request", lambda: request)
        yield


def records(run_dir):
    """Lines of metrics.jsonl, without what depends on the clock."""
    lines = [json.loads(line) for line in (run_dir / "metrics.jsonl").read_text().splitlines()]
    timed = {"tokens_per_second", "flops_utilisation", "joules_per_token", "seconds", "joules"}
    return [{k: v for k, v in line.items() if k not in timed} for line in lines]


def final_state(run_dir, steps=STEPS):
    """All arrays of the newest checkpoint, as bytes, and the position in the data."""
    run = config.load(run_dir / "config.yaml")
    mesh = sharding.make_mesh((1, 1), jax.devices("cpu")[:1])
    with Checkpoints(run_dir / "checkpoints", run.checkpoint_keep) as checkpoints:
        state, position = checkpoints.restore(abstract_state(run, mesh))
    assert state.step == steps
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(state))
    return [np.asarray(leaf).tobytes() for leaf in jax.tree.leaves(state)], position

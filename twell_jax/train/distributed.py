"""Lets several processes train one model: they find each other, stop and fail together."""

import contextlib
import itertools
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, NoReturn

import jax
import numpy as np
from jax.experimental import multihost_utils

from twell_jax.config import ConfigError
from twell_jax.train import interrupt

_ADDRESS, _COUNT, _INDEX = "JAX_COORDINATOR_ADDRESS", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID"
_LAUNCHERS = ("SLURM_STEP_NUM_TASKS", "OMPI_COMM_WORLD_SIZE")  # set by srun and mpirun


def initialize(heartbeat_seconds: int) -> None:
    """Joins the processes that were launched together; does nothing if this process is alone.

    The environment names them: JAX_COORDINATOR_ADDRESS (host:port on process 0), JAX_NUM_PROCESSES
    and JAX_PROCESS_ID, or what `srun` and `mpirun` set. Call it before JAX sees its devices.

    Args:
      heartbeat_seconds: a process that is silent for this long counts as lost, and all others end.

    Raises:
      ConfigError: the environment is incomplete or contradicts itself.
    """
    if _ADDRESS in os.environ:
        missing = [name for name in (_COUNT, _INDEX) if not os.environ.get(name, "").isdecimal()]
        if missing:
            raise ConfigError(f"{_ADDRESS} is set, so {' and '.join(missing)} must be numbers")
        count, index = int(os.environ[_COUNT]), int(os.environ[_INDEX])
        if index >= count:
            raise ConfigError(f"{_INDEX}: must be below {_COUNT}={count}, got {index}")
        host, _, port = os.environ[_ADDRESS].rpartition(":")
        if not (host and port.isdecimal() and 0 < int(port) < 2**16):
            raise ConfigError(
                f"{_ADDRESS}: must be the host:port of process 0, such as node0:1234, got "
                f"{os.environ[_ADDRESS]!r}"
            )
        launch: dict[str, Any] = {
            "num_processes": count,
            "process_id": index,
            "cluster_detection_method": "deactivate",
        }
    elif os.environ.get(_COUNT, "1") != "1" or os.environ.get(_INDEX, "0") != "0":
        raise ConfigError(f"{_COUNT} and {_INDEX} need {_ADDRESS}, the host:port of process 0")
    elif any(int(os.environ.get(name, 1)) > 1 for name in _LAUNCHERS):
        launch = {}
    else:
        return
    jax.distributed.initialize(
        **launch,
        heartbeat_timeout_seconds=heartbeat_seconds,
        shutdown_timeout_seconds=heartbeat_seconds,
    )


@contextlib.contextmanager
def stop_request() -> Iterator[Callable[[int], bool]]:
    """Inside, SIGTERM and Ctrl-C ask the run to stop.

    Before the first step nothing is to be saved, so Ctrl-C ends the process at once, and so does a
    second Ctrl-C at any time: see `interrupt.end`.

    Yields:
      A function of the step that says whether to stop after it. Every process must call it before
      the first step, and after every step. All get the same answer, whichever of them received the
      signal.
    """
    several = jax.process_count() > 1  # since `initialize`, JAX handles their SIGTERM
    asked, interrupted, stepped = (threading.Event() for _ in range(3))
    ask = partial(os.kill, os.getpid(), signal.SIGTERM) if several else asked.set
    calls = itertools.count()

    def stop_after(step: int) -> bool:
        if next(calls):
            stepped.set()
        return multihost_utils.reached_preemption_sync_point(step) if several else asked.is_set()

    def on_interrupt() -> None:
        if not stepped.is_set():
            interrupt.end("stopped before a step was taken; the same command continues")
        if interrupted.is_set():
            interrupt.end("stopped; the same command continues from the last checkpoint")
        interrupted.set()
        ask()
        interrupt.say("stopping after this step, to save it; Ctrl-C again stops at once")

    actions = {signal.SIGINT: on_interrupt} | ({} if several else {signal.SIGTERM: asked.set})
    with interrupt.handled(actions):
        yield stop_after


def all_agree(*votes: bool) -> tuple[bool, ...]:
    """For each vote, whether it is yes in all processes, every one of which must call this."""
    if jax.process_count() == 1:
        return votes
    gathered = multihost_utils.process_allgather(np.array(votes))
    return tuple(np.all(gathered, axis=0).tolist())


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends this process with a message; the others notice and end too."""
    if not jax.distributed.is_initialized():
        print(message, file=sys.stderr)
        sys.exit(status)
    print(f"process {jax.process_index()}: {message}", file=sys.stderr, flush=True)
    os._exit(status)  # an orderly exit would wait for processes that wait for this one

"""Lets several processes train one model: they find each other, stop and fail together."""

import os
import signal
import sys
import threading
from collections.abc import Callable
from typing import Any, NoReturn

import jax
from jax.experimental import multihost_utils

from twell_jax.config import ConfigError

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


def stop_request() -> Callable[[int], bool]:
    """From now on, lets SIGTERM ask the run to stop.

    Returns:
      A function of the step that says whether to stop after it. Every process must call it after
      every step. All get the same answer, whichever of them received the signal.
    """
    if jax.process_count() > 1:  # since `initialize`, JAX handles the signal
        return multihost_utils.reached_preemption_sync_point
    stop = threading.Event()
    signal.signal(signal.SIGTERM, lambda *_: stop.set())
    return lambda step: stop.is_set()


def fail(message: str, status: int = 1) -> NoReturn:
    """Ends this process with a message; the others notice and end too."""
    if not jax.distributed.is_initialized():
        print(message, file=sys.stderr)
        sys.exit(status)
    print(f"process {jax.process_index()}: {message}", file=sys.stderr, flush=True)
    os._exit(status)  # an orderly exit would wait for processes that wait for this one

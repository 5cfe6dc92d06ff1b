"""Traces some steps of a run by JAX's profiler, for xprof and Perfetto."""

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from rich.console import Console

log = logging.getLogger(__name__)


class Trace(NamedTuple):
    """What a run calls with the number of steps taken and the state after them.

    Attributes:
      before_step: begins the trace if it is time.
      after_step: ends it if it is time.
    """

    before_step: Callable[[int, Any], None]
    after_step: Callable[[int, Any], None]


@contextlib.contextmanager
def traced(directory: Path, steps: tuple[int, int] | None, console: Console) -> Iterator[Trace]:
    """Yields what traces some of the steps that the block takes.

    If the block ends before the trace, that ends with it. A trace that fails is a warning and never
    ends a run.

    Args:
      directory: the trace goes into `plugins/profile` in it, in the formats of xprof and, as
        `perfetto_trace.json.gz`, of Perfetto.
      steps: the numbers of steps between which the trace is; None: there is none.
      console: where its path is printed.
    """
    first, last = steps or (0, 0)
    is_running = False

    def stop() -> None:
        nonlocal is_running
        is_running = False
        with _failure_is_a_warning():
            jax.profiler.stop_trace()
            console.out(f"trace: {directory}")

    def before_step(step: int, state: Any) -> None:
        nonlocal is_running
        if is_running or not first <= step < last:
            return
        jax.block_until_ready(state)
        with _failure_is_a_warning():
            jax.profiler.start_trace(str(directory), create_perfetto_trace=True)
            is_running = True

    def after_step(step: int, state: Any) -> None:
        if is_running and step >= last:
            jax.block_until_ready(state)  # else the trace would lack what has yet to run
            stop()

    try:
        yield Trace(before_step, after_step)
    finally:
        if is_running:
            stop()


@contextlib.contextmanager
def _failure_is_a_warning() -> Iterator[None]:
    try:
        yield
    except Exception as error:  # of the profiler, or of the disk
        log.warning("profile_steps: %s: %s", type(error).__name__, error)

"""Measures by a profile how long the devices spend on collectives in a step."""

import tempfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import jax
from jax.profiler import ProfileData


class Event(NamedTuple):
    """One event of a profile: its place, its name, and its time in nanoseconds."""

    plane: str
    line: str
    name: str
    start: float
    end: float


def measure(call: Callable[[], Any], devices: int) -> dict[str, float]:
    """Profiles one call and summarises it; the result is empty without a GPU."""
    events = list(trace(call))
    return summarise(events, devices) if jax.default_backend() == "gpu" else {}


def trace(call: Callable[[], Any]) -> Iterator[Event]:
    """The events that the profiler saw during one call."""
    options = jax.profiler.ProfileOptions()
    options.python_tracer_level = 0  # it would slow down what enqueues the kernels
    with tempfile.TemporaryDirectory() as directory:
        with jax.profiler.trace(directory, profiler_options=options):
            jax.block_until_ready(call())
        (path,) = Path(directory).rglob("*.xplane.pb")
        for plane in ProfileData.from_file(str(path)).planes:
            for line in plane.lines:
                for event in line.events:
                    yield Event(plane.name, line.name, event.name, event.start_ns, event.end_ns)


def summarise(events: Iterable[Event], devices: int) -> dict[str, float]:
    """Sums up how long NCCL's kernels run, including the time that they wait for other devices.

    Returns:
      Means over GPUs, in milliseconds. collective_ms: the time in which an NCCL kernel runs;
      exposed_ms: the part of it in which no other kernel runs.

    Raises:
      ValueError: the events are from fewer GPUs than `devices`, or from several without NCCL.
    """
    communication, work = defaultdict(list), defaultdict(list)
    for event in events:
        # The other lines repeat the streams' events, by module or operation.
        if event.plane.startswith("/device:GPU:") and event.line.startswith("Stream"):
            kind = communication if "nccl" in event.name.lower() else work
            kind[event.plane].append((event.start, event.end))
    if len(work) < devices:
        raise ValueError(f"the profile has kernels of {len(work)} GPUs, not of {devices}")
    if devices > 1 and not communication:
        raise ValueError("the profile has no kernel of NCCL")
    alone = sum(_covered(work[p] + communication[p]) - _covered(work[p]) for p in list(work))
    return {
        "collective_ms": sum(map(_covered, communication.values())) / devices / 1e6,
        "exposed_ms": alone / devices / 1e6,
    }


def _covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of the intervals."""
    total, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        total += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return total

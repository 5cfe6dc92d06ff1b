"""Compiled calls of whole models: time, peak memory and energy."""

import math
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

import jax
import numpy as np

from twell_jax.analysis import timing
from twell_jax.train import pace

ENERGY_SECONDS = 5.0  # NVML's counter advances in steps of up to 0.1 s


@dataclass(frozen=True)
class Call:
    """A compiled call to measure.

    Attributes:
      run: enqueues the call and returns its result, which is always the same.
      tokens: number of tokens that it reads or writes.
      peak_bytes: the device memory that it needs.
      wait: waits for a result of `run` and returns it as what NumPy can read.
      milliseconds: the time of `run(calls=...)`, as by `timing.milliseconds`.
      details: further entries of its row.
    """

    run: Callable[[], Any]
    tokens: int
    peak_bytes: int
    wait: Callable[[Any], Any] = jax.block_until_ready
    milliseconds: Callable[..., float] = field(default_factory=lambda: timing.milliseconds)
    details: Mapping[str, Any] = MappingProxyType({})


def measure(call: Call) -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """A row with time, peak memory and, if it can be read, energy; and the result of the call.

    What is compared of the result is by the names of its errors. The time is taken right after the
    energy, so that the GPU has the clocks that its limit of power allows for this call, and not
    faster ones because it has been idle.
    """
    out = call.wait(call.run())
    out = jax.tree.map(np.asarray, out if isinstance(out, dict) else {"error": out})
    calls = max(1, min(50, math.ceil(0.5 / _seconds(call, 1))))
    energy = {}
    if joules() is not None:
        count = math.ceil(calls * ENERGY_SECONDS / _seconds(call, calls))
        before = joules()
        _seconds(call, count)
        energy = {"joules_per_token": (joules() - before) / (count * call.tokens)}
    ms = call.milliseconds(call.run, calls=calls)
    row = {"ms": ms, "tokens_per_second": call.tokens / ms * 1e3, "peak_bytes": call.peak_bytes}
    return row | dict(call.details) | energy, out


def _seconds(call: Call, count: int) -> float:
    """How long so many calls take, one after the other, with waiting for the last one."""
    start = time.perf_counter()
    for _ in range(count):
        result = call.run()
    call.wait(result)
    return time.perf_counter() - start


def joules() -> float | None:
    """Energy in joules that the GPU which computes has used, or None; see `pace.joules`."""
    return pace.joules(jax.devices()[:1])


def peak_bytes(compiled: jax.stages.Compiled) -> int:
    """The device memory that a program needs, its operands included."""
    return compiled.memory_analysis().peak_memory_in_bytes

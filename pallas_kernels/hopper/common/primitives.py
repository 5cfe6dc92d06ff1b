"""Device primitives: steps that the Pallas language lacks, each with a twin in plain JAX.

Inside a kernel a primitive is code for lanes and warps (`plgpu.inline_mgpu`), which Pallas'
interpreter cannot run. `interpreting` runs kernels on the CPU with the twins in their places, so
that pipelines, barriers and indexing can be checked there.
"""

import contextlib
import dataclasses
import functools
import threading
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import io_callback
from jax.experimental.pallas import mosaic_gpu as plgpu


@dataclasses.dataclass(frozen=True)
class Interpretation:
    """What kernels are interpreted with.

    Attributes:
      sms: the number of SMs that the device seems to have.
      shared: what twins keep between their calls, for instance what thread blocks tell each other.
      counters: numbers that thread blocks share; see `count_together`.
    """

    sms: int
    shared: dict[str, Any] = dataclasses.field(default_factory=dict)
    counters: dict[str, int] = dataclasses.field(default_factory=dict)


_current: Interpretation | None = None


def interpretation() -> Interpretation | None:
    """The one that goes on; None on a device, or when a kernel is lowered for one."""
    return _current


@contextlib.contextmanager
def interpreting(*, sms: int = 132, detect_races: bool = True) -> Iterator[Interpretation]:
    """Runs the kernels that are traced inside on the CPU, with the twins of all primitives.

    JAX keeps what it has traced: of a function that was jitted outside or for another
    interpretation, `sms` and what twins share are those of then, so jit it anew inside.

    Args:
      sms: the number of SMs that the device seems to have; fewer are quicker.
      detect_races: whether the interpreter looks for races, which it prints as "RACE".
    """
    global _current
    before, _current = _current, Interpretation(sms)
    try:
        with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=detect_races)):
            yield _current
    finally:
        _current = before


_counting = threading.Lock()


def count_together(name: str, step: Callable[..., int], *operands: jax.Array) -> jax.Array:
    """For twins: the counter of this name, 0 at first, becomes `step(counter, *operands)`. Kernels
    run one after the other, so that those with the same name may share it.

    The interpreter has no atomic operations, so the host has the counters.

    Returns:
      int32 scalar, the counter before.
    """
    assert _current is not None
    counters = _current.counters

    def count(*operands):
        with _counting:
            before = counters.get(name, 0)
            counters[name] = step(before, *map(int, operands))
        return np.int32(before)

    return io_callback(count, jax.ShapeDtypeStruct((), jnp.int32), *operands)


class Primitive[**P, R]:
    """A function for kernels; `@NAME.in_jax` registers what computes the same in plain JAX."""

    def __init__(self, on_device: Callable[P, R]):
        functools.update_wrapper(self, on_device)
        self._on_device = on_device
        self._twin: Callable[..., R] | None = None

    def in_jax(self, twin: Callable[..., R]) -> Callable[..., R]:
        """Registers the twin, a function of the same arguments."""
        self._twin = twin
        return twin

    def __call__(self, *args: P.args, **kwargs: P.kwargs) -> R:
        if _current is None:
            return self._on_device(*args, **kwargs)
        if self._twin is None:
            raise NotImplementedError(f"{self._on_device.__name__} has no twin in plain JAX")
        return self._twin(*args, **kwargs)


def primitive[**P, R](on_device: Callable[P, R]) -> Primitive[P, R]:
    """Makes a `Primitive` of a function that runs steps of `plgpu.inline_mgpu`."""
    return Primitive(on_device)

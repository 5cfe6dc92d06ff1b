"""What a caller can change so that kernels serve a call that dense XLA serves."""

import functools
import logging
from dataclasses import replace
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.weights import DTYPES
from twell_jax.ffn import dispatch
from twell_jax.ffn.activations import rectifier
from twell_jax.ffn.algorithms import Case, Request

log = logging.getLogger(__name__)

# D and H are multiples of these, and D is no smaller. Whether kernels serve what this makes of a
# call, they are asked.
_WIDTHS, _NARROWEST, _NEURONS = 64, 128, 128


class Remedy(NamedTuple):
    """Why dense XLA serves a call, and what a kernel would serve instead.

    Attributes:
      problems: what is in the way, in words.
      changes: for each of them what to write instead.
      algorithm: the one that would serve then.
    """

    problems: tuple[str, ...]
    changes: tuple[str, ...]
    algorithm: str

    def __str__(self) -> str:
        problems, changes = ", ".join(self.problems), " and ".join(self.changes)
        return f"{problems}: {changes} would be served, by {self.algorithm}"


def find(case: Case, request: Request, dtype: jax.typing.DTypeLike) -> Remedy | None:
    """What would let kernels of this device serve a call that they do not.

    Args:
      case, request: those of the call, which dense XLA serves.
      dtype: that of x.

    Returns:
      The remedy; None if the caller asks for XLA, if the device has no kernels, or if they would
      not serve anyway.
    """
    if request.implementation is not None:
        return None
    per_device = _NEURONS * case.devices.neurons
    width = max(_NARROWEST, case.width + -case.width % _WIDTHS)
    neurons = case.neurons + -case.neurons % per_device
    silu = rectifier(case.activation) is None
    found = {  # what to write instead, by what is in the way
        f"x is {jnp.dtype(dtype)}": jnp.dtype(dtype) not in DTYPES and "bfloat16",
        f"D is {case.width}": width != case.width and f"D = {width}",
        f"H is {case.neurons}": neurons != case.neurons and f"H = {neurons}",
        f"the activation is {case.activation}": silu and "relu",
        "there are biases": case.biases and "no biases",
    }
    problems = {problem: change for problem, change in found.items() if change}
    kernels, why = dispatch.back_end(jax.ShapeDtypeStruct((neurons, width), jnp.bfloat16))
    if not problems or kernels is None:
        return None
    changed = replace(
        case,
        width=width,
        neurons=neurons,
        activation="relu" if silu else case.activation,
        biases=False,
        back_end=kernels.name,
        no_back_end=why,
    )
    known = dtype if jnp.dtype(dtype) in DTYPES else "bfloat16"
    times = dispatch.measured_here(changed, known)
    algorithm = dispatch.select(changed, request, times).rule.algorithm
    if algorithm == "dense":
        return None
    return Remedy(tuple(problems), tuple(map(str, problems.values())), algorithm)


def warn(case: Case, request: Request, dtype: jax.typing.DTypeLike) -> None:
    """Warns, once for each of them, of what keeps kernels from a call that dense XLA serves.

    An activation is not warned of: who takes SiLU wants the dense twin.
    """
    if rectifier(case.activation) is None:
        return
    if (remedy := find(case, request, dtype)) is not None:
        warn_once(str(remedy))


@functools.cache
def warn_once(remedy: str) -> None:
    """Warns of a remedy, if it was not yet."""
    log.warning(
        "dense XLA serves a block on this GPU: %s; twell_jax.explain says more, "
        "implementation='xla' asks for it",
        remedy,
    )

"""Kernels that start before the ones ahead of them have ended (programmatic dependent launch).

GPUs without TMA have none of this: there kernels run one after the other. The engine decides so
when these functions are traced. As JAX keeps what it has traced of a function, `pl.when` must not
get one of them, but a new function that calls it.
"""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import engine
from pallas_kernels.hopper.common.primitives import primitive


def _control(what: str) -> None:
    @plgpu.inline_mgpu()
    def step(_):
        mgpu.utils.inline_ptx(f"griddepcontrol.{what};", has_side_effects=True)

    if engine.current().has_tma:
        step()


@primitive
def launch_next() -> None:
    """Lets the next kernel start."""
    _control("launch_dependents")


@primitive
def await_previous() -> None:
    """Waits until the kernels before this one have ended, and their stores can be read."""
    _control("wait")


@launch_next.in_jax
@await_previous.in_jax
def _one_after_the_other() -> None:
    """The interpreter runs one kernel after the other."""

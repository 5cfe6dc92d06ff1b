"""The threads of a warpgroup together."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.primitives import primitive


@primitive
def barrier() -> None:
    """Waits for all warps, for instance so that shared memory can be filled again."""

    @plgpu.inline_mgpu()
    def step(_):
        mgpu.warpgroup_barrier()

    step()


@primitive
def fence() -> None:
    """Orders what this warpgroup and the cluster's other blocks store to GMEM and load from it.

    It is called before a warpgroup arrives at a barrier of the cluster, for its stores to be seen
    behind the barrier, and behind it, before it loads what others have stored.
    """

    @plgpu.inline_mgpu()
    def step(_):
        mgpu.utils.inline_ptx("fence.acq_rel.cluster;", has_side_effects=True)
        mgpu.warpgroup_barrier()

    step()


@primitive
def end_reads() -> None:
    """Orders each thread's reads of SMEM before what TMA writes there, once that has waited at a
    barrier at which the thread then arrives."""

    @plgpu.inline_mgpu()
    def step(_):
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)

    step()


@end_reads.in_jax
def _committed() -> None:
    plgpu.commit_smem()


@barrier.in_jax
@fence.in_jax
def _one_thread() -> None:
    """A thread of the interpreter stands for a warpgroup, and sees what others have stored."""

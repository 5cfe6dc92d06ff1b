"""The queue from which the SMs of a persistent kernel take their jobs.

All SMs share one counter in GMEM, from which a free SM takes the next job. The SM's producer takes
it and passes it to the consumers through shared memory while they still work on the job before.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const

_WORDS = 4  # int32 that describe a job
_INT32 = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)


def scratch_types(consumers: int) -> dict:
    """The shared memory and barriers of a `JobQueue`: all of its attributes but `taken`."""
    return dict(
        jobs=plgpu.SMEM((3, _WORDS), jnp.int32),
        posted=plgpu.Barrier(num_arrivals=1, num_barriers=2),
        read=plgpu.Barrier(num_arrivals=consumers, num_barriers=2),
    )


@dataclasses.dataclass(frozen=True)
class JobQueue:
    """The jobs of one SM. Four int32 describe a job; the first is not negative.

    Attributes:
      taken: GMEM, int32 `[1]`, the counter that all SMs share: 0 before the kernel and after it.
      jobs: SMEM, int32 `[3, 4]`, the descriptions of two jobs, and scratch.
      posted: barriers at which the consumers wait for a description.
      read: barriers at which the producer waits until the consumers have read one.
    """

    taken: jax.Ref
    jobs: jax.Ref
    posted: jax.Ref
    read: jax.Ref

    def ask(self, count: jax.Array) -> jax.Array:
        """The producer asks for one more of `count` jobs; `answer` waits for its number.

        An SM asks once for each job that it has done. All SMs together then ask `count` times,
        after which `taken` is 0 again.
        """
        return _take(self.taken, count)

    def answer(self, asked: jax.Array, sms: int) -> jax.Array:
        """The number of the job that the producer has asked for: `count` or more if there is none.

        The producer waits here, or at an earlier fence, as fences wait for pending loads.
        """
        return sms + _broadcast_first(asked, self.jobs.at[2])

    def post(self, n: jax.Array, job: tuple[jax.Array, ...]) -> None:
        """The producer describes the n-th job of its SM."""
        plgpu.barrier_wait(self.read.at[n % 2])
        for k, word in enumerate(job):
            self.jobs[n % 2, k] = word
        plgpu.barrier_arrive(self.posted.at[n % 2])

    def post_end(self, n: jax.Array) -> None:
        """The producer says that its SM has only n jobs, and waits until all consumers know it."""
        self.post(n, (jnp.int32(-1),))
        for s in range(2):
            plgpu.barrier_wait(self.read.at[(n + 1 + s) % 2])

    def open(self) -> None:
        """Every consumer calls this first, to say that it has no description to read."""
        for s in range(2):
            plgpu.barrier_arrive(self.read.at[s])

    def take(self, n: jax.Array) -> tuple[jax.Array, ...]:
        """A consumer waits for the n-th job; its first word is negative if there is none."""
        plgpu.barrier_wait(self.posted.at[n % 2])
        job = tuple(self.jobs[n % 2, k] for k in range(_WORDS))
        plgpu.barrier_arrive(self.read.at[n % 2])
        return job


def _take(taken_ref, count):
    """Increments `taken_ref`, after `count` - 1 to 0; the first thread gets the old value."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=_INT32)
    def step(_, taken_ref, count):
        last = arith.subi(count.registers.item(), const(1))
        taken = simt.first_thread_atomic("inc", simt.gmem_address(taken_ref, const(0)), last)
        return mgpu.FragmentedArray.splat(taken, (), is_signed=True)

    return step(taken_ref, count)


def _broadcast_first(value, scratch_ref):
    @plgpu.inline_mgpu(arg_types=(SCALAR, plgpu.RefType()), return_type=_INT32)
    def step(_, value, scratch_ref):
        scratch = simt.smem_address(scratch_ref)
        value = simt.broadcast_first(value.registers.item(), scratch)
        return mgpu.FragmentedArray.splat(value, (), is_signed=True)

    return step(value, scratch_ref)

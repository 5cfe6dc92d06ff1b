"""Matmuls with gathered rows on Hopper: the frame of `union_*`, `hidden_grads`, `weight_grads`.

A producer warpgroup fills a `Ring` of shared-memory stages; two consumer warpgroups multiply them,
each into an accumulator of its own, up to 64 x 256. An SM takes its jobs from a `JobQueue`.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import copies, engine, params
from pallas_kernels.hopper.common.dependent_launch import launch_next
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS, tiled
from pallas_kernels.hopper.unions import pipeline
from pallas_kernels.hopper.unions.pipeline import JobQueue, Ring
from pallas_kernels.layouts.tile_union import TILE_TOKENS

_BUFFERS = 2  # of a consumer, for `write`
_FEW_TILES = 4  # row tiles that leave most SMs without a job of 256 tokens


def job_tokens(tiles: int) -> int:
    """Tokens of a row tile in one job: all, or where jobs would be few, half."""
    return TILE_TOKENS // 2 if tiles <= _FEW_TILES else TILE_TOKENS


def gathered_matmul(
    operands: Any,
    *,
    job_type: type[tuple],
    jobs: Callable[..., jax.Array],
    describe: Callable[..., tuple],
    produce: Callable[..., jax.Array],
    consume: Callable[..., jax.Array],
    a_shape: tuple[int, int],
    b_shape: tuple[int, int],
    b_copies: int = 1,
    dtype: jax.typing.DTypeLike,
    stage_dtype: jax.typing.DTypeLike | None = None,
    out_type,
    transposed: bool = False,
    name: str,
):
    """Runs jobs on all SMs; in each job, each consumer computes one product.

    Args:
      operands: a NamedTuple of arrays, which the functions below get as references to GMEM.
      job_type: a NamedTuple of four int32 that describe a job, the first of them not negative.
      jobs: `jobs(operands)` returns the number of jobs, int32.
      describe: `describe(i, operands)` returns the i-th job.
      produce: the producer calls it as `produce(job, ring, step, operands)`, with the next step of
        the ring. Returns the step after the last one that it filled.
      consume: both consumers call it as
        `consume(job, ring, step, warpgroup, buffers, operands, *outputs)`; `buffers` are its
        `Buffers`. Returns the same step as `produce`.
      a_shape, b_shape: shapes of a stage's arrays in SMEM, with transforms `tiled`;
        `Ring.put_lists` needs a of as many rows as `Engine.part`.
      b_copies: number of TMA copies that fill b in a stage.
      dtype: that of the results, 16-bit.
      stage_dtype: that of the stages; None for that of the results. If it differs, a stage's a may
        also hold as many rows of `Engine.part` elements of the results' dtype.
      out_type: shapes and dtypes of the outputs, which are returned.
      transposed: whether `Buffers` write transposes of what they are given.
      name: the kernel's name.
    """
    stage_dtype = dtype if stage_dtype is None else stage_dtype
    stages, part = engine.current().stages, engine.current().part

    def tiles(shape, dtype):
        return plgpu.SMEM(shape, dtype, transforms=tiled(dtype, shape[-1]))

    a = tiles((stages, *a_shape), stage_dtype)
    a_16 = tiles((stages, a_shape[0], part), dtype)
    rows = {"a": a} if stage_dtype == dtype else {"views_of_a": plgpu.RefUnion(a, a_16)}
    if a_shape[0] == part:
        rows["indices"] = plgpu.SMEM((stages // 2 + 1, part), jnp.int32)
    buffer = (part, ACC_ROWS) if transposed else (ACC_ROWS, part)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            job_type=job_type,
            jobs=jobs,
            describe=describe,
            produce=produce,
            consume=consume,
            transposed=transposed,
        ),
        out_type=out_type,
        scratch_types=dict(
            ring=dict(
                **rows,
                b=tiles((stages, *b_shape), stage_dtype),
                loaded=plgpu.Barrier(
                    num_arrivals=copies.arrivals(1 + b_copies), num_barriers=stages
                ),
                free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=stages),
            ),
            queue=pipeline.queue_types(CONSUMERS),
            buffers=tiles((CONSUMERS, _BUFFERS, *buffer), dtype),
        ),
        grid=(sm_count(),),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        # Only `Buffers.write` stores tiles to SMEM, and it has the barriers that it needs.
        compiler_params=dataclasses.replace(
            params.UNORDERED,
            reduction_scratch_bytes=0,  # sums over columns need none
        ),
    )
    # To XLA the counter is a constant, which kernels may share: each leaves it at 0, and they run
    # one after the other. `support` refuses the flags with which they do not.
    return kernel(jnp.array([0], jnp.int32), operands)


def _kernel(
    taken,
    operands,
    *outputs,
    ring,
    queue,
    buffers,
    job_type,
    jobs,
    describe,
    produce,
    consume,
    transposed,
):
    if "views_of_a" in ring:
        ring["a"], ring["a_16"] = ring.pop("views_of_a")
    ring, queue = Ring(**ring), JobQueue(taken, **queue)
    warpgroup = lax.axis_index("warpgroup")
    launch_next()  # `dense_rows` takes SMs that have no more jobs

    def be_producer():
        engine.current().set_registers(56, "decrease")
        count, sms = jobs(operands), lax.axis_size("sm")

        def do(state):
            n, i, step = state
            job = describe(i, operands)
            queue.post(n, job)
            ring_of_job = dataclasses.replace(ring, first=step)
            step = produce(job, ring_of_job, step, operands)
            asked = queue.ask(count)  # the answer arrives while the last rows do
            ring_of_job.finish(step)
            return n + 1, queue.answer(asked, sms), step

        start = jnp.int32(0), lax.axis_index("sm").astype(jnp.int32), jnp.int32(0)
        n, _, step = lax.while_loop(lambda state: state[1] < count, do, start)
        queue.post_end(n)
        ring.close(step)

    def be_consumer():
        engine.current().set_registers(224, "increase")
        ring.open()
        queue.open()

        def do(state):
            n, words, step = state
            mine = Buffers(buffers.at[warpgroup], transposed)
            step = consume(job_type(*words), ring, step, warpgroup, mine, operands, *outputs)
            return n + 1, queue.take(n + 1), step

        start = jnp.int32(0), queue.take(jnp.int32(0)), jnp.int32(0)
        lax.while_loop(lambda state: state[1][0] >= 0, do, start)
        copies.await_stores(0)

    lax.cond(warpgroup == CONSUMERS, be_producer, be_consumer)


@dataclasses.dataclass(frozen=True)
class Buffers:
    """The buffers through which a consumer writes its results to GMEM.

    Attributes:
      ref: SMEM `[2, 64, part]`, or `[2, part, 64]` if `transposed`.
      transposed: whether transposes of arrays are written.
    """

    ref: jax.Ref
    transposed: bool

    def write(self, arrays, part: int, targets) -> list[jax.Ref]:
        """Starts to copy one or two arrays `[64, part]`, or their transposes, to GMEM: each to a
        target, which is an array and the index of its part.

        A consumer writes as many in each part of its product. A single array takes the two buffers
        in turn, so that the copy of the part before may still read the other one.

        Returns:
          The buffers, which hold them until the next part is written.
        """
        copies.await_reads(_BUFFERS - len(arrays))
        used = [self.ref.at[(part + k) % _BUFFERS] for k in range(len(arrays))]
        for array, buffer in zip(arrays, used, strict=True):
            (buffer.T if self.transposed else buffer)[...] = array
        copies.commit()
        for buffer, (target, index) in zip(used, targets, strict=True):
            copies.store(buffer, target, index)
        return used

    def free(self) -> jax.Ref:
        """One of them, when all copies have been read."""
        copies.await_reads(0)
        return self.ref.at[0]

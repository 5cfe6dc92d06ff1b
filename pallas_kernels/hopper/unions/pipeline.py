"""What passes between the producer and the consumers of a persistent matmul: jobs, and stages.

All SMs share one counter in GMEM, from which a free SM takes the next job. The SM's producer takes
it and passes it to the consumers through shared memory while they still work on the job before.

A stage of the ring holds the operands of one step of a product: rows that `row_copies` gathers, and
an array that TMA copies. The producer hands it over some steps later, when the rows have arrived.
"""

import dataclasses
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import copies, engine, row_copies, scalars, simt
from pallas_kernels.hopper.common.engine import Factor
from pallas_kernels.hopper.common.primitives import count_together, primitive
from pallas_kernels.hopper.common.scalars import INT32, SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import ACC_ROWS

_WORDS = 4  # int32 that describe a job


def queue_types(consumers: int) -> dict:
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


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages on their way from the producer to the consumers, numbered by `step` across all jobs.

    Attributes:
      a: SMEM, each stage's array of gathered rows.
      b: SMEM, each stage's array that TMA fills.
      loaded: barriers at which a consumer waits for a stage.
      free: barriers at which the producer waits until both consumers have given a stage back.
      indices: SMEM, int32 `[lag + 1, part]`, the row indices for the next stages; None if all
        stages of a job gather the same rows.
      first: step of the job's first stage.
      a_16: a again, as 16-bit arrays, if the products are of 8-bit floats; a stage is read as it
        was filled.
    """

    a: jax.Ref
    b: jax.Ref
    loaded: jax.Ref
    free: jax.Ref
    indices: jax.Ref | None = None
    first: jax.Array | int = 0
    a_16: jax.Ref | None = None

    @property
    def stages(self) -> int:
        """Their number."""
        return self.b.shape[0]

    @property
    def lag(self) -> int:
        """Steps between filling a stage and handing it over."""
        return self.stages // 2

    def load_indices(self, indices_ref, *, fetched: bool = False) -> jax.Array:
        """Loads the indices of a stage's rows; see `row_copies.load_indices`."""
        rows = row_copies.lane_rows(self.a.shape[1:], self.a.dtype)
        return row_copies.load_indices(indices_ref, rows, fetched=fetched)

    def in_16_bits(self) -> "Ring":
        """The same ring for stages whose rows are of 16 bits, whatever the others are."""
        return self if self.a_16 is None else dataclasses.replace(self, a=self.a_16)

    def put(self, step: jax.Array, fill: Callable[..., None]) -> None:
        """Fills a stage by `fill(a, b, loaded)`.

        `fill` may call `row_copies.gather_rows`, and must cause `b_copies` arrivals at `loaded`, as
        that many TMA copies to b do.
        """
        s = self._stage(step)
        plgpu.barrier_wait(self.free.at[s])
        fill(self.a.at[s], self.b.at[s], self.loaded.at[s])
        row_copies.await_rows(lag=self.lag)
        self._hand_over(step - self.lag)

    def put_lists(self, step: jax.Array, steps: jax.Array, source, fill: Callable[..., None]):
        """Fills `steps` stages, the k-th by `fill(k, indices, a, b, loaded)`.

        `indices`, for `row_copies.gather_rows`, come from `source(k)` (GMEM, int32 `[part]`), which
        is also called for some k past the end. They are copied as the rows are, and early enough
        that no stage waits for them.

        Returns:
          The next step.
        """
        assert self.indices is not None  # `a` has `part` rows in a stage
        ahead = self.indices.shape[0]
        for k in range(ahead):
            row_copies.fetch_indices(source(jnp.int32(k)), self.indices.at[k], jnp.bool(True))
        row_copies.await_rows(lag=0)

        @pl.loop(0, steps)
        def _(k):
            def fill_stage(a, b, loaded):
                buffer = self.indices.at[lax.rem(k, jnp.int32(ahead))]
                fill(k, self.load_indices(buffer, fetched=True), a, b, loaded)
                row_copies.fetch_indices(source(k + ahead), buffer, k + ahead < steps)

            self.put(step + k, fill_stage)

        return step + steps

    def put_product(self, step, tokens_ref, first_token, source_ref, indices, limit):
        """Fills the stages of a product of 128 gathered rows and tokens of a row tile.

        Args:
          step: the step of the first stage.
          tokens_ref: GMEM `[M, D]`.
          first_token: the first of the tokens; there are as many as b has rows.
          source_ref, indices, limit: as in `row_copies.gather_rows`; rows have D columns.

        Returns:
          The next step.
        """

        columns = self.b.shape[2]

        def put(k, step):
            def fill(a, b, loaded):
                mine = pl.ds(first_token, b.shape[0]), pl.ds(k * columns, columns)
                copies.load(tokens_ref, mine, b, loaded)
                row_copies.gather_rows(source_ref, indices, limit, k * columns, a)

            self.put(step, fill)
            return step + 1

        return lax.fori_loop(0, tokens_ref.shape[1] // columns, put, step)

    def finish(self, step: jax.Array) -> None:
        """Hands over the last stages of a job; `step` is the one after them."""
        row_copies.await_rows(lag=0)
        for lag in range(self.lag, 0, -1):
            self._hand_over(step - lag)

    def close(self, step: jax.Array) -> None:
        """Waits until all stages are free again; `step` is the one after the last."""
        for s in range(self.stages):
            plgpu.barrier_wait(self.free.at[self._stage(step + s)])

    def _stage(self, step):
        return lax.rem(step, jnp.int32(self.stages))

    def _hand_over(self, step):
        s = self._stage(jnp.maximum(step, 0))
        plgpu.barrier_arrive(self.loaded.at[s], predicate=step >= self.first)

    def take(self, step: jax.Array):
        """A consumer waits for a stage and gets its `(a, b)`."""
        s = self._stage(step)
        plgpu.barrier_wait(self.loaded.at[s])
        return self.a.at[s], self.b.at[s]

    def open(self) -> None:
        """Both consumers call this first, to give all stages to the producer."""
        for s in range(self.stages):
            self.release(jnp.int32(s))

    def release(self, step: jax.Array, predicate: jax.Array | None = None) -> None:
        """A consumer gives a stage back; it is free when both have."""
        s = self._stage(jnp.maximum(step, 0))
        plgpu.barrier_arrive(self.free.at[s], predicate=predicate)

    def multiply(
        self,
        step: jax.Array,
        steps: jax.Array,
        factors: Callable[..., tuple[Factor, Factor]],
        scratch: Callable[[], jax.Ref],
        *,
        columns: int,
        is_needed: jax.Array | bool = True,
    ) -> jax.Array:
        """A consumer sums up the products of `factors(a, b)` of `steps` stages.

        Args:
          step: the step of the first stage.
          steps: their number.
          factors: what to multiply of a stage.
          scratch: what the consumer may overwrite, as of `Engine.sum_products`.
          columns: of the result.
          is_needed: whether it is.

        Returns:
          float32 `[64, columns]`. If not `is_needed`, it is 0, and the consumer gives the stages
          back as they come.
        """
        used = jnp.where(is_needed, steps, 0)

        @pl.loop(used, steps)
        def _(k):
            self.take(step + k)
            self.release(step + k)

        return engine.current().sum_products(
            columns,
            used,
            lambda k: factors(*self.take(step + k)),
            lambda k, predicate: self.release(step + k, predicate=predicate),
            lambda _: scratch(),
        )

    def multiply_product(self, step, steps, warpgroup, limit, scratch):
        """This consumer's 64 rows of the product from `put_product`, float32 `[64, tokens]`.

        They are 0, and not computed, if none of them is below `limit`.
        """
        mine = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)
        return self.multiply(
            step,
            steps,
            lambda a, b: (Factor(a.at[mine], 1), Factor(b, 1)),
            scratch,
            columns=self.b.shape[1],
            is_needed=limit > warpgroup * ACC_ROWS,
        )


@primitive
def _take(taken_ref, count):
    """Increments `taken_ref`, after `count` - 1 to 0; the first thread gets the old value."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=INT32)
    def step(_, taken_ref, count):
        last = arith.subi(count.registers.item(), const(1))
        taken = simt.first_thread_atomic("inc", simt.gmem_address(taken_ref, const(0)), last)
        return scalars.int32(taken)

    return step(taken_ref, count)


@_take.in_jax
def _(taken_ref, count):
    return count_together("jobs taken", lambda n, count: n + 1 if n + 1 < count else 0, count)


@primitive
def _broadcast_first(value, scratch_ref):
    """What the first thread has, for all."""

    @plgpu.inline_mgpu(arg_types=(SCALAR, plgpu.RefType()), return_type=INT32)
    def step(_, value, scratch_ref):
        scratch = simt.smem_address(scratch_ref)
        value = simt.broadcast_first(value.registers.item(), scratch)
        return scalars.int32(value)

    return step(value, scratch_ref)


@_broadcast_first.in_jax
def _(value, scratch_ref):
    return value

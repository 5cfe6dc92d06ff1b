"""Matmuls with gathered rows on Hopper: the frame of the union kernels and of `weight_grads`.

A producer warpgroup fills a ring of shared-memory stages; two consumer warpgroups multiply them,
each into an accumulator of its own, 64 x 256 as a rule. TMA gathers no rows on Hopper. The
producer's threads fetch them by `cp.async` instead, 16 bytes at a time; a stage is handed over two
steps later, when they have arrived.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.device import simt
from pallas_kernels.hopper.device.gather import SCALAR
from pallas_kernels.hopper.device.simt import const
from pallas_kernels.hopper.frames import job_queue
from pallas_kernels.hopper.frames.gate_matmul import sm_count
from pallas_kernels.hopper.frames.job_queue import JobQueue

CONSUMERS = 2
ROWS = 64  # of a consumer's accumulator
STEP = 64  # summands of a stage
TILED = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

_STAGES = 4
_LAG = 2  # steps from the fetch of a stage to its handing over
_AHEAD = _LAG + 1  # steps from the fetch of indices to that of their rows
_LANES = 128
_CHUNK = 8  # columns in 16 bytes
_CHUNKS = 8  # that a lane fetches for a stage, one of each row of a tile
_INDICES = plgpu.Layout.WG_STRIDED((_CHUNKS * _LANES,), vec_size=1)


@dataclasses.dataclass(frozen=True)
class Ring:
    """Stages on their way from the producer to the consumers, numbered by `step` across all jobs.

    Attributes:
      a: SMEM, gathered rows, an array for every stage.
      b: SMEM, what TMA copies.
      loaded, free: barriers.
      indices: SMEM, int32 `[3, 64]`, of the rows of the next stages, if each stage has others.
      first: step of the job's first stage.
    """

    a: jax.Ref
    b: jax.Ref
    loaded: jax.Ref
    free: jax.Ref
    indices: jax.Ref | None = None
    first: jax.Array | int = 0

    def put(self, step: jax.Array, fill: Callable[..., None]) -> None:
        """Fills a stage by `fill(a, b, loaded)`: `gather_rows`, and an arrival at `loaded` for each
        copy to b."""
        s = _stage(step)
        plgpu.barrier_wait(self.free.at[s])
        fill(self.a.at[s], self.b.at[s], self.loaded.at[s])
        _await_rows(lag=_LAG)
        self._hand_over(step - _LAG)

    def put_lists(self, step: jax.Array, steps: jax.Array, source, fill: Callable[..., None]):
        """Fills `steps` stages, the k-th by `fill(k, indices, a, b, loaded)`.

        Its indices, as `gather_rows` takes them, are `source(k)` (GMEM, int32 `[64]`), which is
        also called for some k past the end. They are fetched as the rows are, and early enough that
        no stage waits for them.

        Returns:
          The next step.
        """
        for k in range(_AHEAD):
            _fetch_indices(source(jnp.int32(k)), self.indices.at[k], jnp.bool(True))
        _await_rows(lag=0)

        @pl.loop(0, steps)
        def _(k):
            def fill_stage(a, b, loaded):
                buffer = self.indices.at[lax.rem(k, jnp.int32(_AHEAD))]
                fill(k, _read_indices(buffer), a, b, loaded)
                _fetch_indices(source(k + _AHEAD), buffer, k + _AHEAD < steps)

            self.put(step + k, fill_stage)

        return step + steps

    def put_product(self, step, tokens_ref, first_token, source_ref, indices, limit):
        """Fills the stages of a product of 128 gathered rows and the 256 tokens of a row tile.

        Args:
          step: the next.
          tokens_ref: GMEM `[M, D]`.
          first_token: of the tile.
          source_ref, indices, limit: as `gather_rows` takes them, of rows of D.

        Returns:
          The next step.
        """

        def put(k, step):
            def fill(a, b, loaded):
                tokens = tokens_ref.at[pl.ds(first_token, b.shape[0]), pl.ds(k * STEP, STEP)]
                plgpu.copy_gmem_to_smem(tokens, b, loaded)
                gather_rows(source_ref, indices, limit, k * STEP, a)

            self.put(step, fill)
            return step + 1

        return lax.fori_loop(0, tokens_ref.shape[1] // STEP, put, step)

    def finish(self, step: jax.Array) -> None:
        """Hands over the last stages of a job; `step` is the one after them."""
        _await_rows(lag=0)
        for lag in range(_LAG, 0, -1):
            self._hand_over(step - lag)

    def close(self, step: jax.Array) -> None:
        """Waits for all stages to be free again; `step` is the number of all that were filled."""
        for s in range(_STAGES):
            plgpu.barrier_wait(self.free.at[_stage(step + s)])

    def _hand_over(self, step):
        s = _stage(jnp.maximum(step, 0))
        plgpu.barrier_arrive(self.loaded.at[s], predicate=step >= self.first)

    def take(self, step: jax.Array):
        """`(a, b)` of a stage, by a consumer, when it is loaded."""
        s = _stage(step)
        plgpu.barrier_wait(self.loaded.at[s])
        return self.a.at[s], self.b.at[s]

    def open(self) -> None:
        """By both consumers, at first."""
        for s in range(_STAGES):
            self.release(jnp.int32(s))

    def release(self, step: jax.Array, predicate: jax.Array | None = None) -> None:
        """Gives a stage back; both consumers must."""
        s = _stage(jnp.maximum(step, 0))
        plgpu.barrier_arrive(self.free.at[s], predicate=predicate)

    def multiply(
        self,
        step: jax.Array,
        steps: jax.Array,
        wgmma: Callable[..., None],
        *,
        columns: int = 4 * ROWS,
        is_needed: jax.Array | bool = True,
    ) -> jax.Array:
        """Sums up the products of `steps` stages by `wgmma(acc, a, b)`; float32 `[64, columns]`.

        If it is not needed the stages are given back as they come, and all is 0.
        """
        used = jnp.where(is_needed, steps, 0)

        def accumulate(acc):
            @pl.loop(0, used)
            def _(k):
                wgmma(acc, *self.take(step + k))
                plgpu.wgmma_wait(1)
                self.release(step + k - 1, predicate=k > 0)

            plgpu.wgmma_wait(0)
            self.release(step + used - 1, predicate=used > 0)
            return acc[...]

        @pl.loop(used, steps)
        def _(k):
            self.take(step + k)
            self.release(step + k)

        return pl.run_scoped(accumulate, plgpu.ACC((ROWS, columns), jnp.float32))

    def multiply_product(self, step, steps, warpgroup, limit):
        """This consumer's 64 rows of what `put_product` has put, float32 `[64, 256]`.

        A consumer with no row below `limit` leaves its products out.
        """
        mine = pl.ds(warpgroup * ROWS, ROWS)
        return self.multiply(
            step,
            steps,
            lambda acc, a, b: plgpu.wgmma(acc, a.at[mine], b.T),
            is_needed=limit > warpgroup * ROWS,
        )


def gathered_matmul(
    describe: Callable[..., tuple[jax.Array, ...]],
    produce: Callable[..., jax.Array],
    consume: Callable[..., jax.Array],
    *operands: jax.Array,
    jobs: Callable[..., jax.Array],
    a_shape: tuple[int, int],
    b_shape: tuple[int, int],
    b_copies: int = 1,
    out_type,
    name: str,
):
    """Runs `jobs(*refs)` jobs, each a product for either consumer, on all SMs.

    An SM that is free takes the next job.

    Args:
      describe: `describe(i, *refs)` says what the i-th job is, in four int32, of which the first is
        not negative; `refs` are the operands and outputs in GMEM.
      produce: called by the producer as `produce(job, ring, step, *refs)`, the job as described;
        `step` is the ring's next. Returns the next after it.
      consume: called by both consumers as `consume(job, ring, step, warpgroup, buffers, *refs)`;
        `buffers` are for `write`. Returns the same step as `produce`.
      *operands: arrays; the last one's dtype is that of the stages.
      jobs: `jobs(*refs)` is their number, int32.
      a_shape, b_shape: of a stage in SMEM, with transforms `TILED`; a has 64 rows for `put_lists`.
      b_copies: that fill b of a stage.
      out_type: shapes of the outputs.
      name: of the kernel.
    """
    dtype = operands[-1].dtype
    indices = {"indices": plgpu.SMEM((_AHEAD, STEP), jnp.int32)} if a_shape[0] == STEP else {}
    kernel = plgpu.kernel(
        functools.partial(_kernel, describe=describe, produce=produce, consume=consume, jobs=jobs),
        out_type=out_type,
        scratch_types=dict(
            ring=dict(
                a=plgpu.SMEM((_STAGES, *a_shape), dtype, transforms=TILED),
                b=plgpu.SMEM((_STAGES, *b_shape), dtype, transforms=TILED),
                loaded=plgpu.Barrier(num_arrivals=1 + b_copies, num_barriers=_STAGES),
                free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=_STAGES),
                **indices,
            ),
            queue=job_queue.scratch_types(CONSUMERS),
            buffers=plgpu.SMEM((CONSUMERS, 2, ROWS, ROWS), dtype, transforms=TILED),
        ),
        grid=(sm_count(),),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        kernel_name=name,
        # `write`, the only one to store tiles to SMEM, has the barriers that it needs.
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane,
            unsafe_no_auto_barriers=True,
            reduction_scratch_bytes=0,  # sums are over columns, for which it is not used
        ),
    )
    # To XLA the counter is a constant. It may be, as each kernel leaves it as it was, and XLA runs
    # one after the other, unless it is told to schedule command buffers as "CONCURRENT".
    return kernel(jnp.array([0], jnp.int32), *operands)


def _kernel(taken, *refs, ring, queue, buffers, describe, produce, consume, jobs):
    ring, queue = Ring(**ring), JobQueue(taken, **queue)
    warpgroup = lax.axis_index("warpgroup")

    def be_producer():
        plgpu.set_max_registers(56, action="decrease")
        count, sms = jobs(*refs), lax.axis_size("sm")

        def do(state):
            n, i, step = state
            job = describe(i, *refs)
            queue.post(n, job)
            ring_of_job = dataclasses.replace(ring, first=step)
            step = produce(job, ring_of_job, step, *refs)
            asked = queue.ask(count)  # the answer comes as the last rows do
            ring_of_job.finish(step)
            return n + 1, queue.answer(asked, sms), step

        start = jnp.int32(0), lax.axis_index("sm").astype(jnp.int32), jnp.int32(0)
        n, _, step = lax.while_loop(lambda state: state[1] < count, do, start)
        queue.post_end(n)
        ring.close(step)

    def be_consumer():
        plgpu.set_max_registers(224, action="increase")
        ring.open()
        queue.open()

        def do(state):
            n, job, step = state
            step = consume(job, ring, step, warpgroup, buffers.at[warpgroup], *refs)
            return n + 1, queue.take(n + 1), step

        start = jnp.int32(0), queue.take(jnp.int32(0)), jnp.int32(0)
        lax.while_loop(lambda state: state[1][0] >= 0, do, start)
        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup == CONSUMERS, be_producer, be_consumer)


def _stage(step):
    return lax.rem(step, jnp.int32(_STAGES))


def load_indices(indices_ref) -> jax.Array:
    """Loads `indices_ref` (GMEM, int32 `[128]`) as `gather_rows` takes it.

    Lanes that fetch pieces of the same 8 rows hold their 8 indices.
    """
    result = plgpu.ShapeDtypeStruct((_CHUNKS * _LANES,), jnp.int32, layout=_INDICES)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, indices_ref):
        group, _ = _group_and_chunk(STEP)
        address = simt.gmem_address(indices_ref, arith.muli(group, const(32)))
        # Not .nc, and volatile: it shall begin here, neither where an index is needed nor before
        # the last fence, which would wait for it.
        return _indices("ld.global", address)

    return step(indices_ref)


def _indices(load: str, address: ir.Value) -> mgpu.FragmentedArray:
    i32 = ir.IntegerType.get_signless(32)
    words = [
        word
        for offset in (0, 16)
        for word in mgpu.utils.inline_ptx(
            f"{load}.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];",
            address,
            result_types=[i32] * 4,
            has_side_effects=True,
        )
    ]
    return simt.int_array(words, _INDICES)


def _fetch_indices(indices_ref, target_ref, active: jax.Array) -> None:
    """Begins to copy 64 indices from GMEM to SMEM, each warp those of the rows that it gathers."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def step(_, indices_ref, target_ref, active):
        lane, warp = simt.lane_and_warp()
        offset = arith.addi(arith.muli(warp, const(64)), arith.muli(lane, const(16)))
        _warp_barrier()  # until all lanes have read what was there
        mgpu.utils.inline_ptx(
            "cp.async.cg.shared.global [$0], [$1], 16;",
            arith.addi(simt.smem_address(target_ref), offset),
            simt.gmem_address(indices_ref, offset),
            predicate=arith.andi(active.registers.item(), simt.less(lane, const(4))),
        )

    step(indices_ref, target_ref, active)


def _read_indices(indices_ref) -> jax.Array:
    """What `load_indices` loads, from SMEM, where `_fetch_indices` has put it."""
    result = plgpu.ShapeDtypeStruct((_CHUNKS * _LANES,), jnp.int32, layout=_INDICES)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, indices_ref):
        group, _ = _group_and_chunk(2 * STEP)
        address = arith.addi(simt.smem_address(indices_ref), arith.muli(group, const(32)))
        _warp_barrier()  # for what other lanes have fetched
        return _indices("ld.shared", address)

    return step(indices_ref)


def _warp_barrier() -> None:
    mgpu.utils.inline_ptx("bar.warp.sync -1;", has_side_effects=True, convergent=True)


def gather_rows(source_ref, indices, limit: jax.Array, column: jax.Array, target_ref) -> None:
    """Begins to copy rows of `source_ref` to `target_ref`, by the producer.

    Row i is `source[indices[i], column:]`, or zeros if i >= limit; so are columns past the end.

    Args:
      source_ref: GMEM `[H, D]`, 16-bit, D a multiple of 8.
      indices: from `load_indices`; those from limit on may be anything.
      limit: int32 scalar.
      column: int32 scalar, a multiple of 8.
      target_ref: SMEM `[64, 256]`, `[64, 128]` or `[128, 64]`, of transforms `TILED`.
    """
    target_columns = target_ref.shape[1]
    width = min(target_columns, 128)  # that the layout of the indices covers
    d = source_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _INDICES, SCALAR, SCALAR, plgpu.RefType(TILED)))
    def step(_, source_ref, indices, limit, column, target_ref):
        group, first_chunk = _group_and_chunk(width)
        for part in range(0, target_columns, width):
            chunk = arith.addi(first_chunk, const(part // _CHUNK))
            # The target consists of 8 x 64 tiles, row by row, with the chunks of a row swizzled.
            tile = arith.muli(group, const(target_columns // 64))
            tile = arith.addi(tile, arith.divui(chunk, const(8)))
            tile = arith.addi(simt.smem_address(target_ref), arith.muli(tile, const(1024)))
            chunk_in_tile = arith.remui(chunk, const(8))
            my_column = arith.addi(column.registers.item(), arith.muli(chunk, const(_CHUNK)))
            source = simt.gmem_address(source_ref, arith.muli(my_column, const(2)))
            is_column = simt.less(my_column, const(d))
            my_limit = arith.subi(limit.registers.item(), arith.muli(group, const(8)))
            for i, index in enumerate(indices.registers):
                is_row = arith.cmpi(arith.CmpIPredicate.slt, const(i), my_limit)
                place = arith.muli(arith.xori(chunk_in_tile, const(i)), const(16))
                mgpu.utils.inline_ptx(
                    f"""{{.reg .b32 index, bytes; .reg .b64 address;
                        selp.b32 bytes, 16, 0, $3;
                        selp.b32 index, $2, 0, $3;
                        mad.wide.u32 address, index, {2 * d}, $1;
                        cp.async.cg.shared.global [$0 + {128 * i}], [address], 16, bytes;}}""",
                    arith.addi(tile, place),
                    source,
                    mgpu.utils.bitcast(index, my_column.type),
                    arith.andi(is_row, is_column),
                    has_side_effects=True,
                )

    step(source_ref, indices, limit, column, target_ref)


def _group_and_chunk(width: int):
    """The group of 8 rows and the 16-byte chunk in each that this lane fetches."""
    lane, warp = simt.lane_and_warp()
    thread = arith.addi(arith.muli(warp, const(32)), lane)
    chunks = const(width // _CHUNK)
    return arith.divui(thread, chunks), arith.remui(thread, chunks)


def _await_rows(*, lag: int) -> None:
    """Ends a step's copies by `gather_rows`; waits for those of all but the last `lag` steps."""

    @plgpu.inline_mgpu()
    def step(_):
        mgpu.utils.inline_ptx(
            f"cp.async.commit_group; cp.async.wait_group {lag}; fence.proxy.async.shared::cta;",
            has_side_effects=True,
        )

    step()


def write(array: jax.Array, buffer_ref, target_ref, *, transposed: bool = False) -> None:
    """Begins to copy `array` (`[64, 64]` or its transpose) to GMEM by way of a buffer, in turn."""
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)
    (buffer_ref.T if transposed else buffer_ref)[...] = array
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(buffer_ref, target_ref)

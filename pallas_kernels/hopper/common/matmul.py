"""`a @ b` on Hopper, with an epilogue that sees the accumulators: the frame of the gate kernels and
of `dense_block`.

A producer warpgroup streams tiles of `a` and `b` through a ring of shared-memory stages by TMA; two
consumer warpgroups, one above the other along the rows of `a`, multiply them by the `engine` and
hand their accumulators to the epilogue. By WGMMA a stage passes from the producer to the first
consumer, then to the second, then back: the second stays a step behind, so that it still multiplies
when the first begins its epilogue. The ring runs on across output blocks, so that the next operands
are there when an epilogue ends.

Without TMA there is no producer, as no warpgroup could give it registers: each consumer copies its
half of a stage by `cp.async`, some steps ahead of the one that it multiplies.
"""

import dataclasses
import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import copies, engine, params, row_copies, versions
from pallas_kernels.hopper.common.engine import Engine, Factor
from pallas_kernels.hopper.common.scales import of_columns, of_rows, padded
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS, are_before, tiled
from pallas_kernels.quantised import Scales

BLOCK_ROWS = CONSUMERS * ACC_ROWS  # rows of `a` in a tile


@dataclasses.dataclass(frozen=True)
class Schedule:
    """How the SMs go through a product.

    Attributes:
      stages: stages of the ring in shared memory, at most, 3 or more. The consumers hold two
        between them and the producer must be able to fill another.
      columns: columns of each of the matrices `b` in one tile, a multiple of 8.
      parts: into how many equal parts K is split, each of which is a tile of its own.
      grid_tile_width: column tiles that are swept together along the rows, for reuse in L2.
    """

    stages: int = 4
    columns: int = 256
    parts: int = 1
    grid_tile_width: int = 8

    def __post_init__(self):
        if self.stages < 3:
            raise ValueError(f"stages must be at least 3, got {self.stages}")


def matmul(
    a: jax.Array,
    bs: tuple[jax.Array, ...],
    epilogue: Callable[..., None],
    *,
    k_axis: int = 1,
    out_type,
    scratch_types: dict[str, plgpu.SMEM],
    schedule: Schedule,
    rows: jax.Array | None = None,
    leave_out: Callable[..., None] | None = None,
    scales: Scales | None = None,
    name: str | None = None,
):
    """Multiplies `a` with one or more matrices and gives tiles of the results to `epilogue`.

    Args:
      a: `[rows, K]`, bfloat16 or float16, K a multiple of 64; or float8_e4m3fn, of 128.
      bs: of the same dtype and shape: `[columns, K]` (`k_axis` 1), or one `[K, columns]` (0).
      epilogue: called by each consumer as `epilogue(acc, slab, tile, *out_refs, **scratch_refs)`.
        `acc` is float32, `[64, n c]` for n matrices and c columns of each, which lie side by side:
        rows from 64 * slab on, columns from c * (tile // parts) on, and of the sum over K the part
        tile % parts. Rows and columns past the ends are products with zeros: 0, or NaN where the
        other factor is not finite. Before the next call, its copies from SMEM to GMEM have read
        SMEM, and its warpgroup has met at a barrier.
      k_axis: the axis of K in `bs`.
      out_type: shapes and dtypes of the outputs, in GMEM.
      scratch_types: SMEM shared by the consumers; by convention indexed by `slab % CONSUMERS`.
      schedule: what the SMs do when.
      rows: int32 `[1]`: only so many rows of `a`, the first, are multiplied, in whole blocks of
        128. In the last of them the other rows are 0 for `epilogue`, which is not called
        for further blocks. None: all.
      leave_out: called by each consumer as `leave_out(slab, tile, *out_refs)` for further blocks.
        None: what is in them is unspecified.
      scales: float32 `[rows]` and `[columns]`, for one matrix: the product is multiplied with those
        of its columns, then with those of its rows. None: it is not.
      name: the kernel's name.

    Returns:
      The outputs.
    """
    k, columns = a.shape[1], schedule.columns
    size = bs[0].shape[1 - k_axis]
    cost = versions.cost(2 * k * len(a) * len(bs) * size, (a, *bs, *jax.tree.leaves(out_type)))
    multiplier = engine.current()
    step = multiplier.stage_k(a.dtype)
    b_shape = (len(bs) * columns, step) if k_axis == 1 else (step, columns)
    scratch = jax.tree.leaves(scratch_types, is_leaf=lambda leaf: hasattr(leaf, "shape"))
    room = multiplier.ring_bytes - sum(math.prod(s.shape) * s.dtype.itemsize for s in scratch)
    most = room // ((BLOCK_ROWS * step + math.prod(b_shape)) * a.dtype.itemsize)
    stages = min(schedule.stages, most, k // step // schedule.parts)
    blocks = pl.cdiv(a.shape[0], BLOCK_ROWS), pl.cdiv(size, columns) * schedule.parts
    # For the tiling below.
    a, *matrices = (jnp.pad(w, ((0, -w.shape[0] % 8), (0, 0))) for w in (a, *bs))
    if scales is not None:
        scales = padded(scales[0], BLOCK_ROWS), padded(scales[1], columns)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel,
            epilogue=epilogue,
            leave_out=leave_out,
            blocks=blocks,
            k_axis=k_axis,
            schedule=schedule,
            multiplier=multiplier,
        ),
        out_type=out_type,
        scratch_types=dict(
            ring=dict(
                a=plgpu.SMEM((stages, BLOCK_ROWS, step), a.dtype, transforms=tiled(a.dtype, step)),
                b=plgpu.SMEM((stages, *b_shape), a.dtype, transforms=tiled(a.dtype, b_shape[1])),
                loaded=plgpu.Barrier(
                    num_arrivals=1 + len(bs) if multiplier.has_tma else CONSUMERS,
                    num_barriers=stages,
                ),
                handed=plgpu.Barrier(num_barriers=stages),
                free=plgpu.Barrier(
                    num_arrivals=1 if multiplier.staggered else CONSUMERS, num_barriers=stages
                ),
            ),
            scratch=scratch_types,
        ),
        grid=(min(sm_count(), math.prod(blocks)),),
        grid_names=("sm",),
        num_threads=CONSUMERS + (1 if multiplier.has_tma else 0),
        thread_name="warpgroup",
        kernel_name=name,
        **cost,
        compiler_params=params.ORDERED,
    )
    return kernel(rows, scales, a, matrices)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The output blocks, in the order in which an SM goes through them.

    Attributes:
      shape: row blocks, whose number may be known on the device alone, and column tiles, each as
        often as K has parts.
      steps: stages that one block takes.
      stages: stages in the ring.
      k_axis: the axis of K in the matrices `b`.
      schedule: what the SMs do when.
      multiplier: how they multiply.
    """

    shape: tuple[int | jax.Array, int]
    steps: int
    stages: int
    k_axis: int
    schedule: Schedule
    multiplier: Engine

    def for_each(self, body: Callable[..., None]) -> None:
        """Calls `body(row block, column tile, steps before)` for every block of this SM."""

        @plgpu.nd_loop((math.prod(self.shape),), collective_axes="sm")
        def _(loop):
            body(*self._place(*loop.index), loop.local_index * self.steps)

    def _place(self, index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return plgpu.planar_snake(index, self.shape, 1, self.schedule.grid_tile_width)

    def of_step(self, step: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The row block and column tile of a step of this SM, and the step in that block."""
        number, k = lax.div(step, jnp.int32(self.steps)), lax.rem(step, jnp.int32(self.steps))
        return *self._place(number * lax.axis_size("sm") + lax.axis_index("sm")), k

    @property
    def all_steps(self) -> jax.Array:
        """Of this SM."""
        left = math.prod(self.shape) - lax.axis_index("sm")
        return pl.cdiv(left, lax.axis_size("sm")) * self.steps

    def stage(self, step: jax.Array) -> jax.Array:
        """The stage of the ring that a step takes."""
        return lax.rem(step, jnp.int32(self.stages))


def _kernel(
    rows,
    scales,
    a_gmem,
    bs_gmem,
    *outs,
    ring,
    scratch,
    epilogue,
    leave_out,
    blocks,
    k_axis,
    schedule,
    multiplier,
):
    limit = None if rows is None else jnp.clip(rows[0], 0, a_gmem.shape[0])
    every, computed = blocks, blocks[0] if limit is None else pl.cdiv(limit, BLOCK_ROWS)
    stages, _, step = ring["a"].shape
    steps = a_gmem.shape[1] // step // schedule.parts
    blocks = _Blocks((computed, every[1]), steps, stages, k_axis, schedule, multiplier)
    warpgroup = lax.axis_index("warpgroup")
    is_first = warpgroup == 0

    def finish(acc, slab, tile):
        if scales is not None:
            acc *= of_columns(scales[1], tile * schedule.columns, acc.shape)
            acc *= of_rows(scales[0], slab * ACC_ROWS, acc.shape)
        if limit is not None:
            left = limit - slab * ACC_ROWS

            def cut():
                return jnp.where(are_before(left, acc.shape), acc, 0.0)

            acc = lax.cond(left < ACC_ROWS, cut, lambda: acc)
        epilogue(acc, slab, tile, *outs, **scratch)

    load = functools.partial(_load, blocks, ring, a_gmem, bs_gmem)

    def consume():
        copied = None if multiplier.has_tma else load
        _consume(blocks, ring, warpgroup, is_first, finish, copied)
        if limit is not None and leave_out is not None:
            others = dataclasses.replace(blocks, shape=(every[0] - computed, every[1]))

            @others.for_each
            def _(block, tile, _):
                leave_out(CONSUMERS * (computed + block) + warpgroup, tile, *outs)

    if multiplier.has_tma:
        lax.cond(warpgroup == CONSUMERS, lambda: _produce(blocks, ring, load), consume)
    else:
        consume()


def _load(blocks, ring, a_gmem, bs_gmem, step, block, tile, k, half=None):
    """Starts to copy what a step multiplies: all, or of each operand the first or second half."""
    s, (size, schedule) = blocks.stage(step), (ring["a"].shape[2], blocks.schedule)
    loaded = ring["loaded"].at[s]

    def part(rows):
        middle = -(-rows // 16) * 8  # whole tiles
        return {None: (0, rows), 0: (0, middle), 1: (middle, rows - middle)}[half]

    def copy(source, rows, columns, target, first, count):
        start, count = part(count)
        if count:
            mine = target.at[s, pl.ds(first + start, count)]
            copies.load(source, (pl.ds(rows + start, count), columns), mine, loaded)

    along_k = (tile % schedule.parts * blocks.steps + k) * size
    column = tile // schedule.parts * schedule.columns
    copy(a_gmem, block * BLOCK_ROWS, pl.ds(along_k, size), ring["a"], 0, BLOCK_ROWS)
    for i, b in enumerate(bs_gmem):
        if blocks.k_axis == 1:
            first, count = i * schedule.columns, schedule.columns
            copy(b, column, pl.ds(along_k, size), ring["b"], first, count)
        else:
            copy(b, along_k, pl.ds(column, schedule.columns), ring["b"], 0, size)


def _produce(blocks, ring, load):
    blocks.multiplier.set_registers(40, "decrease")

    @blocks.for_each
    def _(block, tile, before):
        @pl.loop(0, blocks.steps)
        def _(k):
            plgpu.barrier_wait(ring["free"].at[blocks.stage(before + k)])
            load(before + k, block, tile, k)

    _await_all(blocks, ring)


def _await_all(blocks, ring):
    """Waits until all stages have been given back."""
    for s in range(blocks.stages):
        plgpu.barrier_wait(ring["free"].at[s])


def _copy_ahead(blocks, ring, warpgroup, load):
    """Without TMA: starts this warpgroup's copies for the first steps. Returns a function that goes
    on with those some steps behind a step, and hands those over that end in front of the next."""
    ahead = blocks.stages - 1
    assert ahead > 0  # K has two stages at least

    def start(step):
        @pl.when(step < blocks.all_steps)
        def _():
            plgpu.barrier_wait(ring["free"].at[blocks.stage(step)])
            for half in range(CONSUMERS):
                pl.when(warpgroup == half)(
                    functools.partial(load, step, *blocks.of_step(step), half)
                )

    def hand_over(step):
        loaded = ring["loaded"].at[blocks.stage(step)]
        plgpu.barrier_arrive(loaded, predicate=step < blocks.all_steps)

    for step in range(ahead):
        start(jnp.int32(step))
        row_copies.await_rows(lag=ahead - 1)
    hand_over(jnp.int32(0))

    def go_on(step):
        start(step + ahead)
        row_copies.await_rows(lag=ahead - 1)
        hand_over(step + 1)

    return go_on


def _consume(blocks, ring, warpgroup, is_first, finish, load=None):
    """With `load` the consumers do what a producer would."""
    loaded, handed, free = ring["loaded"], ring["handed"], ring["free"]
    blocks.multiplier.set_registers(232, "increase")
    my_rows = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)
    gives_back = ~is_first if blocks.multiplier.staggered else None

    for s in range(blocks.stages):
        plgpu.barrier_arrive(free.at[s], predicate=gives_back)
    copy_ahead = _copy_ahead(blocks, ring, warpgroup, load) if load else lambda step: None

    @blocks.for_each
    def _(block, tile, before):
        def mine(k):
            return ring["a"].at[blocks.stage(before + k), my_rows]

        def take(k):
            s = blocks.stage(before + k)
            copy_ahead(before + k)
            if blocks.multiplier.staggered:
                lax.cond(
                    is_first,
                    lambda: plgpu.barrier_wait(loaded.at[s]),
                    lambda: plgpu.barrier_wait(handed.at[s]),
                )
            else:
                plgpu.barrier_wait(loaded.at[s])
            return Factor(mine(k), 1), Factor(ring["b"].at[s], blocks.k_axis)

        def release(k, predicate):
            s = blocks.stage(before + k)
            if blocks.multiplier.staggered:
                plgpu.barrier_arrive(handed.at[s], predicate=_both(is_first, predicate))
            plgpu.barrier_arrive(free.at[s], predicate=_both(gives_back, predicate))

        columns = ring["b"].shape[2 - blocks.k_axis]
        acc = blocks.multiplier.sum_products(columns, blocks.steps, take, release, mine)
        copies.await_reads(0)
        finish(acc, CONSUMERS * block + warpgroup, tile)

    copies.await_stores(0)
    if load:
        _await_all(blocks, ring)


def _both(one, other):
    """Of predicates of which None always holds."""
    return one if other is None else other if one is None else one & other

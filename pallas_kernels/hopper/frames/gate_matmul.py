"""`a @ b^T` on Hopper, with an epilogue that sees the accumulators: the frame of the gate kernels.

A producer warpgroup streams tiles of `a` and `b` through a ring of shared-memory stages by TMA; two
consumer warpgroups, one above the other along the rows of `a`, multiply them with WGMMA and hand
their 64 x 256 accumulators to the epilogue. A stage passes from the producer to the first consumer,
then to the second, then back: the second stays a step behind, so that it still multiplies when the
first begins its epilogue. The ring runs on across output blocks, so that the next operands are
there when an epilogue ends.
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

from pallas_kernels.hopper.device import versions
from pallas_kernels.hopper.device.scales import of_columns, of_rows, padded
from pallas_kernels.hopper.device.tiles import ACC_ROWS, CONSUMERS, are_before, stage_k, tiled
from pallas_kernels.hopper.support import sm_count
from pallas_kernels.layouts.quantised import Scales

ACC_COLUMNS = 256  # columns of one consumer's accumulator
_BLOCK_ROWS = CONSUMERS * ACC_ROWS


@dataclasses.dataclass(frozen=True)
class GateConfig:
    """Schedule of a gate matmul on Hopper.

    Attributes:
      stages: stages of the ring in shared memory, 3 or 4, of 48 KiB each. The consumers hold two
        between them and the producer must be able to fill another.
      grid_tile_width: column tiles that are swept together along the rows, for reuse in L2.
    """

    stages: int = 4
    grid_tile_width: int = 8

    def __post_init__(self):
        if not 3 <= self.stages <= 4:
            raise ValueError(f"stages must be 3 or 4, got {self.stages}")


def gate_matmul(
    a: jax.Array,
    b: jax.Array,
    epilogue: Callable[..., None],
    *,
    out_type,
    scratch_types: dict[str, plgpu.SMEM],
    config: GateConfig,
    rows: jax.Array | None = None,
    leave_out: Callable[..., None] | None = None,
    scales: Scales | None = None,
):
    """Multiplies `a @ b^T` and gives the result to `epilogue`, 64 x 256 at a time.

    Args:
      a: `[rows, D]`, bfloat16 or float16, D a multiple of 64; or float8_e4m3fn, of 128.
      b: `[columns, D]` of the same dtype.
      epilogue: called by each consumer as `epilogue(acc, slab, tile, *out_refs, **scratch_refs)`
        with float32 `acc: [64, 256]`, rows from 64 * slab and columns from 256 * tile on. Rows and
        columns past the ends are products with zeros: 0, or NaN where the other factor is not
        finite. Before the next call, its copies from SMEM to GMEM have read SMEM, and its warpgroup
        has met at a barrier.
      out_type: shapes and dtypes of the outputs, in GMEM.
      scratch_types: SMEM shared by the consumers; by convention indexed by `slab % CONSUMERS`.
      config: schedule.
      rows: int32 `[1]`: only so many rows of `a`, the first, are multiplied, in whole blocks of
        128. In the last of them the other rows are 0 for `epilogue`, which is not called
        for further blocks. None: all.
      leave_out: called by each consumer as `leave_out(slab, tile, *out_refs)` for further blocks.
        None: what is in them is unspecified.
      scales: float32 `[rows]` and `[columns]`: the product is multiplied with those of its columns,
        then with those of its rows. None: it is not.

    Returns:
      The outputs.
    """
    d = a.shape[1]
    cost = versions.cost(2 * d * len(a) * len(b), (a, b, *jax.tree.leaves(out_type)))
    step = stage_k(a.dtype)
    stages = min(config.stages, d // step)
    blocks = pl.cdiv(a.shape[0], _BLOCK_ROWS), pl.cdiv(b.shape[0], ACC_COLUMNS)
    a, b = (jnp.pad(w, ((0, -w.shape[0] % 8), (0, 0))) for w in (a, b))  # for the tiling below
    if scales is not None:
        scales = padded(scales[0], _BLOCK_ROWS), padded(scales[1], ACC_COLUMNS)
    kernel = plgpu.kernel(
        functools.partial(
            _kernel, epilogue=epilogue, leave_out=leave_out, blocks=blocks, config=config
        ),
        out_type=out_type,
        scratch_types=dict(
            ring=dict(
                a=plgpu.SMEM((stages, _BLOCK_ROWS, step), a.dtype, transforms=tiled(a.dtype)),
                b=plgpu.SMEM((stages, ACC_COLUMNS, step), b.dtype, transforms=tiled(b.dtype)),
                loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # one per operand
                handed=plgpu.Barrier(num_barriers=stages),
                free=plgpu.Barrier(num_barriers=stages),
            ),
            scratch=scratch_types,
        ),
        grid=(min(sm_count(), math.prod(blocks)),),
        grid_names=("sm",),
        num_threads=CONSUMERS + 1,
        thread_name="warpgroup",
        **cost,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(rows, scales, a, b)


@dataclasses.dataclass(frozen=True)
class _Blocks:
    """The output blocks, in the order in which an SM goes through them.

    Attributes:
      shape: row blocks, whose number may be known on the device alone, and column tiles.
      steps: stages that one block takes.
      stages: stages in the ring.
      config: schedule.
    """

    shape: tuple[int | jax.Array, int]
    steps: int
    stages: int
    config: GateConfig

    def for_each(self, body: Callable[..., None]) -> None:
        """Calls `body(row block, column tile, steps before)` for every block of this SM."""

        @plgpu.nd_loop((math.prod(self.shape),), collective_axes="sm")
        def _(loop):
            (index,) = loop.index
            block, tile = plgpu.planar_snake(index, self.shape, 1, self.config.grid_tile_width)
            body(block, tile, loop.local_index * self.steps)

    def stage(self, step: jax.Array) -> jax.Array:
        """The stage of the ring that a step takes."""
        return lax.rem(step, jnp.int32(self.stages))


def _kernel(
    rows, scales, a_gmem, b_gmem, *outs, ring, scratch, epilogue, leave_out, blocks, config
):
    limit = None if rows is None else jnp.clip(rows[0], 0, a_gmem.shape[0])
    every, computed = blocks, blocks[0] if limit is None else pl.cdiv(limit, _BLOCK_ROWS)
    steps, stages = a_gmem.shape[1] // ring["a"].shape[2], ring["a"].shape[0]
    blocks = _Blocks((computed, every[1]), steps, stages, config)
    warpgroup = lax.axis_index("warpgroup")
    is_first = warpgroup == 0

    def finish(acc, slab, tile):
        if scales is not None:
            acc *= of_columns(scales[1], tile * ACC_COLUMNS, acc.shape)
            acc *= of_rows(scales[0], slab * ACC_ROWS, acc.shape)
        if limit is not None:
            acc = jnp.where(are_before(limit - slab * ACC_ROWS, acc.shape), acc, 0)
        epilogue(acc, slab, tile, *outs, **scratch)

    def consume():
        _consume(blocks, ring, warpgroup, is_first, finish)
        if limit is not None and leave_out is not None:
            others = _Blocks((every[0] - computed, every[1]), steps, stages, config)

            @others.for_each
            def _(block, tile, _):
                leave_out(CONSUMERS * (computed + block) + warpgroup, tile, *outs)

    lax.cond(warpgroup == CONSUMERS, lambda: _produce(blocks, ring, a_gmem, b_gmem), consume)


def _produce(blocks, ring, a_gmem, b_gmem):
    plgpu.set_max_registers(40, action="decrease")

    @blocks.for_each
    def _(block, tile, before):
        @pl.loop(0, blocks.steps)
        def _(k):
            s = blocks.stage(before + k)
            plgpu.barrier_wait(ring["free"].at[s])
            step = ring["a"].shape[2]
            columns = pl.ds(k * step, step)
            plgpu.copy_gmem_to_smem(
                a_gmem.at[pl.ds(block * _BLOCK_ROWS, _BLOCK_ROWS), columns],
                ring["a"].at[s],
                ring["loaded"].at[s],
            )
            plgpu.copy_gmem_to_smem(
                b_gmem.at[pl.ds(tile * ACC_COLUMNS, ACC_COLUMNS), columns],
                ring["b"].at[s],
                ring["loaded"].at[s],
            )

    for s in range(blocks.stages):
        plgpu.barrier_wait(ring["free"].at[s])


def _consume(blocks, ring, warpgroup, is_first, finish):
    loaded, handed, free = ring["loaded"], ring["handed"], ring["free"]
    plgpu.set_max_registers(232, action="increase")
    my_rows = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)

    for s in range(blocks.stages):
        plgpu.barrier_arrive(free.at[s], predicate=~is_first)

    def pass_on(s):
        plgpu.barrier_arrive(handed.at[s], predicate=is_first)
        plgpu.barrier_arrive(free.at[s], predicate=~is_first)

    @blocks.for_each
    def _(block, tile, before):
        def multiply(acc, k):
            s = blocks.stage(before + k)
            lax.cond(
                is_first,
                lambda: plgpu.barrier_wait(loaded.at[s]),
                lambda: plgpu.barrier_wait(handed.at[s]),
            )
            plgpu.wgmma(acc, ring["a"].at[s, my_rows], ring["b"].at[s].T)

        def accumulate(acc):
            multiply(acc, 0)

            @pl.loop(1, blocks.steps)
            def _(k):
                multiply(acc, k)
                plgpu.wgmma_wait(1)
                pass_on(blocks.stage(before + k - 1))

            plgpu.wgmma_wait(0)
            pass_on(blocks.stage(before + blocks.steps - 1))
            return acc[...]

        acc = pl.run_scoped(accumulate, plgpu.ACC((ACC_ROWS, ACC_COLUMNS), jnp.float32))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        finish(acc, CONSUMERS * block + warpgroup, tile)

    plgpu.wait_smem_to_gmem(0)

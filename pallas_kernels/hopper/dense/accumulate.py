"""Sums of products over a pipeline that copies operands: the frame of `dense_rows`."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import copies, engine
from pallas_kernels.hopper.common.tiles import CONSUMERS, tiled


class Operand(NamedTuple):
    """A matrix of which each stage has a block.

    Attributes:
      source: GMEM.
      block: rows and columns in a stage.
      axis: the one along which stages follow each other.
      first: where blocks begin on the other axis.
      skipped: blocks before that of the first stage.
    """

    source: Any
    block: tuple[int, int]
    axis: int
    first: int | jax.Array = 0
    skipped: int | jax.Array = 0

    def of_stage(self, k: jax.Array) -> tuple:
        """The index of a stage's block."""
        rows, columns = self.block
        if self.axis == 0:
            return pl.ds((self.skipped + k) * rows, rows), pl.ds(self.first, columns)
        return pl.ds(self.first, rows), pl.ds((self.skipped + k) * columns, columns)


def accumulate(
    operands: list[Operand],
    factors: Callable[..., Any],
    finish: Callable[[list[jax.Array]], None],
    columns: list[int],
    stages: int,
    slots: int,
    scratch: Any,
) -> None:
    """A pipeline of `stages`, for which shared memory has `slots`.

    Of a stage, `factors(*smem)` are those of the sums, `[64, c]` for each c of `columns`.
    `finish` gets the sums. `scratch` is SMEM of the warpgroup, as of `Engine.sum_products`.
    """
    multiplier = engine.current()

    def unused():
        copies.await_reads(0)
        return scratch

    def sum_up(pipeline):
        finish(multiplier.sum_in_pipeline(pipeline, columns, unused))

    if multiplier.has_tma:
        _by_tma(operands, factors, sum_up, stages, slots)
    else:
        _by_threads(operands, factors, sum_up, stages, slots)


def _by_tma(operands, factors, sum_up, stages, slots):
    def multiply(_, *smem_and_sums):
        *smem, sums = smem_and_sums
        return engine.current().step(sums, factors(*smem))

    def spec(operand):
        def index(k):
            return (operand.skipped + k, 0) if operand.axis == 0 else (0, operand.skipped + k)

        transforms = tiled(operand.source.dtype, operand.block[1])
        return plgpu.BlockSpec(operand.block, index, transforms=transforms, delay_release=1)

    def part(operand):
        mine = pl.ds(operand.first, operand.block[1 - operand.axis])
        return operand.source.at[(slice(None), mine) if operand.axis == 0 else mine]

    plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(stages,),
        memory_registers=40,
        in_specs=list(map(spec, operands)),
        wg_axis="warpgroup",
        num_compute_wgs=CONSUMERS,
        max_concurrent_steps=min(slots, stages),
        compute_context=sum_up,
    )(*map(part, operands))


def _by_threads(operands, factors, sum_up, stages, slots):
    slots = min(slots, stages)

    def slot(k):
        return lax.rem(jnp.int32(k), jnp.int32(slots))

    def run(*smem, loaded, free):
        def produce():
            @pl.loop(0, stages)
            def _(k):
                pl.when(k >= slots)(lambda: plgpu.barrier_wait(free.at[slot(k)]))
                for operand, target in zip(operands, smem, strict=True):
                    copies.load(operand.source, operand.of_stage(k), target.at[slot(k)], None)
                copies.hand_over(lambda k: loaded.at[slot(k)], k)

            copies.hand_over_last(lambda k: loaded.at[slot(k)], stages)

        def step(k, carry):
            plgpu.barrier_wait(loaded.at[slot(k)])
            carry = engine.current().step(carry, factors(*(a.at[slot(k)] for a in smem)))
            plgpu.barrier_arrive(free.at[slot(k)], predicate=k + slots < stages)
            return carry

        def consume():
            sum_up(lambda carry: lax.fori_loop(0, stages, step, carry))

        lax.cond(lax.axis_index("warpgroup") == CONSUMERS, produce, consume)

    pl.run_scoped(
        run,
        *(
            plgpu.SMEM(
                (slots, *o.block), o.source.dtype, transforms=tiled(o.source.dtype, o.block[1])
            )
            for o in operands
        ),
        loaded=plgpu.Barrier(num_arrivals=1, num_barriers=slots),
        free=plgpu.Barrier(num_arrivals=CONSUMERS, num_barriers=slots),
        collective_axes="warpgroup",
    )

"""One warpgroup copies all stages of its block through the ring, in the order of their use."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import STAGE_WORDS
from pallas_kernels.hopper.decode.one_launch.shape import (
    DOWN,
    DOWN_COLUMNS,
    DOWN_ROWS,
    GATE,
    OUT,
    QKV,
    UNITS,
)

FLIGHT = 2  # stages that are on their way; more would keep what blocks exchange waiting


def copy_all(block: Block) -> None:
    """Copies all stages of this block, in order."""
    shape, refs = block.shape, block.refs

    def room(number):
        slot = lax.rem(number, shape.slots)

        @pl.when(number >= shape.slots)
        def _():
            plgpu.barrier_wait(block.empty.at[slot])

        @pl.when(number >= FLIGHT)
        def _():
            plgpu.barrier_wait(block.full.at[lax.rem(number - FLIGHT, shape.slots)])

        return slot

    def copy(matrix, layer, row, stages, number):
        itemsize = jnp.dtype(matrix.dtype).itemsize
        ring, features = block.rings[itemsize], 4 * STAGE_WORDS // itemsize

        @pl.loop(0, stages)
        def _(stage):
            slot = room(number + stage)
            # Past the last feature, a copy fills in zeros.
            part = matrix.at[layer, pl.ds(row, ROWS), pl.ds(stage * features, features)]
            plgpu.copy_gmem_to_smem(part, ring.at[slot], block.full.at[slot])

        return number + stages

    def groups(which, layer, number, one):
        def group(i, number):
            return one(layer, (block.first[which] + i) * ROWS, number)

        return lax.fori_loop(0, block.many[which], group, number)

    def of_qkv(layer, row, number):
        stages, before = shape.stages(QKV), 0
        for matrix in refs.qkv:
            rows = matrix.shape[1]
            is_here = (row >= before) & (row < before + rows)

            @pl.when(is_here)
            def _(matrix=matrix, before=before):
                copy(matrix, layer, row - before, stages, number)

            before += rows
        return number + stages

    def of_out(layer, row, number):
        return copy(refs.out, layer, row, shape.stages(OUT), number)

    def of_gate(layer, row, number):
        for matrix in refs.activated:
            number = copy(matrix, layer, row, shape.stages(GATE), number)
        return number

    def of_down(layer, number, i):
        blocks = shape.width // DOWN_COLUMNS
        split = lax.div(block.first[DOWN] + i, blocks)
        column = lax.rem(block.first[DOWN] + i, blocks) * DOWN_COLUMNS
        first, stages = shape.rows_of_split(split)

        def stage(j, number):
            slot, row = room(number), (first + j) * DOWN_ROWS
            part = refs.down.at[layer, pl.ds(row, DOWN_ROWS), pl.ds(column, DOWN_COLUMNS)]
            plgpu.copy_gmem_to_smem(part, block.down_ring.at[slot], block.full.at[slot])
            return number + 1

        return lax.fori_loop(0, stages, stage, number)

    def unit(layer, number, i):
        of = block.unit(i)

        def pair(j, number):
            for cache in (refs.k, refs.v):
                slot = room(number)
                keys = cache.at[layer, of.sequence, pl.ds(j * shape.keys, shape.keys), of.head]
                plgpu.copy_gmem_to_smem(keys, block.kv_ring.at[slot], block.full.at[slot])
                number += 1
            return number

        return lax.fori_loop(of.first, of.end, pair, number)

    def layer(layer, number):
        number = groups(QKV, layer, number, of_qkv)
        number = lax.fori_loop(0, block.many[UNITS], lambda i, n: unit(layer, n, i), number)
        number = groups(OUT, layer, number, of_out)
        number = groups(GATE, layer, number, of_gate)
        if shape.is_sparse:
            return number
        return lax.fori_loop(0, block.many[DOWN], lambda i, n: of_down(layer, n, i), number)

    lax.fori_loop(0, shape.layers, layer, jnp.int32(0))

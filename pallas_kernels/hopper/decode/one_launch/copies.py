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

    def rows(which, layer, number, matrices, place):
        """Copies this block's rows of some matrices, a stage in each turn of one loop, which is
        short code; `place` says which matrix has the i-th group of rows, and where."""
        stages = shape.stages(which)

        def stage(i, number):
            slot = room(number)
            chosen, row = place(lax.div(i, stages))
            for k, matrix in enumerate(matrices):
                itemsize = jnp.dtype(matrix.dtype).itemsize
                features = 4 * STAGE_WORDS // itemsize
                first = lax.rem(i, stages) * features
                # Past the last feature, a copy fills in zeros.
                part = matrix.at[layer, pl.ds(row, ROWS), pl.ds(first, features)]
                target = block.rings[itemsize].at[slot], block.full.at[slot]
                pl.when(chosen == k)(
                    lambda part=part, target=target: plgpu.copy_gmem_to_smem(part, *target)
                )
            return number + 1

        turns = len(matrices) if which == GATE else 1
        return lax.fori_loop(0, block.many[which] * turns * stages, stage, number)

    def of_qkv(group):
        """Their rows lie behind each other."""
        row = (block.first[QKV] + group) * ROWS
        chosen, before = jnp.int32(0), jnp.int32(0)
        for k, matrix in enumerate(refs.qkv[:2]):
            is_past = (chosen == k) & (row - before >= matrix.shape[1])
            chosen = chosen + jnp.where(is_past, 1, 0)
            before = before + jnp.where(is_past, matrix.shape[1], 0)
        return chosen, row - before

    def of_out(group):
        return jnp.int32(0), (block.first[OUT] + group) * ROWS

    def of_gate(turn):
        """They take turns."""
        matrices = len(refs.activated)
        return lax.rem(turn, matrices), (block.first[GATE] + lax.div(turn, matrices)) * ROWS

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
        number = rows(QKV, layer, number, refs.qkv, of_qkv)
        number = lax.fori_loop(0, block.many[UNITS], lambda i, n: unit(layer, n, i), number)
        number = rows(OUT, layer, number, (refs.out,), of_out)
        number = rows(GATE, layer, number, refs.activated, of_gate)
        if shape.is_sparse:
            return number
        return lax.fori_loop(0, block.many[DOWN], lambda i, n: of_down(layer, n, i), number)

    lax.fori_loop(0, shape.layers, layer, jnp.int32(0))

"""One warpgroup copies all stages of its block through the ring, in the order of their use."""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.key_products import room_of
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
from pallas_kernels.quantised import values_of

FLIGHT = 2  # stages that are on their way; more would keep what blocks exchange waiting


def copy_all(block: Block) -> None:
    """Copies all stages of this block, in order."""
    refs = block.refs

    def layer(layer, number):
        number = _rows(block, QKV, layer, number, refs.qkv, _side_by_side)
        number = _keys_and_values(block, layer, number)
        number = _rows(block, OUT, layer, number, (refs.out,), _side_by_side)
        number = _rows(block.of_layer(layer), GATE, layer, number, refs.activated, _in_turns)
        return number if block.shape.is_sparse else _down(block, layer, number)

    lax.fori_loop(0, block.shape.layers, layer, jnp.int32(0))


def _room(block: Block, number):
    """The slot of a stage, once it is free and few others are on their way."""
    slots = block.shape.slots
    slot = lax.rem(number, slots)

    @pl.when(number >= slots)
    def _():
        plgpu.barrier_wait(block.empty.at[slot])

    @pl.when(number >= FLIGHT)
    def _():
        plgpu.barrier_wait(block.full.at[lax.rem(number - FLIGHT, slots)])

    return slot


def _rows(block: Block, which: int, layer, number, matrices, place):
    """Copies this block's rows of some matrices, a stage in each turn of one loop, which is short
    code; `place` says which matrix has the i-th group of rows, and its first row there."""
    stages = block.shape.stages(which)

    def stage(i, number):
        slot = _room(block, number)
        chosen, row = place(matrices, block.first[which], lax.div(i, stages))
        for k, matrix in enumerate(matrices):
            itemsize = jnp.dtype(matrix.dtype).itemsize
            features = 4 * STAGE_WORDS // itemsize
            columns = pl.ds(lax.rem(i, stages) * features, features)
            # Past the last feature, a copy fills in zeros.
            part = matrix.at[layer, pl.ds(row, ROWS), columns]
            target = block.rings[itemsize].at[slot], block.full.at[slot]
            pl.when(chosen == k)(
                lambda part=part, target=target: plgpu.copy_gmem_to_smem(part, *target)
            )
        return number + 1

    turns = len(matrices) if place is _in_turns else 1
    return lax.fori_loop(0, block.many[which] * turns * stages, stage, number)


def _side_by_side(matrices, first, i):
    """Rows of the matrices lie behind each other."""
    row = (first + i) * ROWS
    chosen, before = jnp.int32(0), jnp.int32(0)
    for k, matrix in enumerate(matrices[:-1]):
        is_past = (chosen == k) & (row - before >= matrix.shape[1])
        chosen = chosen + jnp.where(is_past, 1, 0)
        before = before + jnp.where(is_past, matrix.shape[1], 0)
    return chosen, row - before


def _in_turns(matrices, first, i):
    """Each group of rows is copied of all matrices."""
    return lax.rem(i, len(matrices)), (first + lax.div(i, len(matrices))) * ROWS


def _keys_and_values(block: Block, layer, number):
    shape, refs = block.shape, block.refs

    def unit(i, number):
        of = block.unit(i)

        def pair(j, number):
            for cache in map(values_of, (refs.k, refs.v)):
                slot = _room(block, number)
                # Past the last feature a copy fills in zeros. Pallas lets it, as it does not know
                # where these begin.
                features = pl.ds(layer * 0, room_of(shape.size))
                keys = pl.ds(j * shape.keys, shape.keys)
                keys = cache.at[layer, of.stored, keys, of.head, features]
                plgpu.copy_gmem_to_smem(keys, block.kv_ring.at[slot], block.full.at[slot])
                number += 1
            return number

        return lax.fori_loop(of.first, of.end, pair, number)

    return lax.fori_loop(0, block.many[UNITS], unit, number)


def _down(block: Block, layer, number):
    shape, down = block.shape, block.refs.down

    def unit(i, number):
        blocks = shape.width // DOWN_COLUMNS
        split = lax.div(block.first[DOWN] + i, blocks)
        columns = pl.ds(lax.rem(block.first[DOWN] + i, blocks) * DOWN_COLUMNS, DOWN_COLUMNS)
        first, stages = shape.rows_of_split(split)

        def stage(j, number):
            slot = _room(block, number)
            part = down.at[layer, pl.ds((first + j) * DOWN_ROWS, DOWN_ROWS), columns]
            plgpu.copy_gmem_to_smem(part, block.down_ring.at[slot], block.full.at[slot])
            return number + 1

        return lax.fori_loop(0, stages, stage, number)

    return lax.fori_loop(0, block.many[DOWN], unit, number)

"""Copies of tiles between GMEM and SMEM: by TMA, or by the threads of a warpgroup on GPUs without.

A frame's producer fills a stage by `load`. By TMA a copy arrives at the stage's barrier by itself.
By `cp.async` the producer does so a stage or more later, when the copies have ended (`hand_over`).
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import engine, row_copies, simt, warpgroup
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import tiled

_CHUNK = 16  # bytes that a lane copies at a time
_LANES = 128


def arrivals(count: int) -> int:
    """Those at a stage's barrier for so many copies: one of each, or the producer's alone."""
    return count if engine.current().has_tma else 1


def arrive_without(barrier) -> None:
    """Arrives in place of a copy that a stage does not have."""
    if engine.current().has_tma:
        plgpu.barrier_arrive(barrier)


def load(source, index: tuple, target, barrier) -> None:
    """A warpgroup starts to copy `source[index]` to SMEM; what lies outside of source is zero.

    Args:
      source: GMEM.
      index: scalars, and slices of the last two axes.
      target: SMEM, with transforms `tiled`.
      barrier: of the stage; only TMA needs it.
    """
    if engine.current().has_tma:
        plgpu.copy_gmem_to_smem(source.at[index], target, barrier)
        return
    *outer, rows, columns = index
    matrix = source.at[tuple(outer)] if outer else source
    first, lane_rows = jnp.int32(rows.start), row_copies.lane_rows(target.shape, target.dtype)
    indices = row_copies.consecutive(first, target.shape[0], lane_rows)
    limit = source.shape[-2] - first
    row_copies.gather_rows(matrix, indices, limit, jnp.int32(columns.start), target)


def hand_over(barrier: Callable[[Any], Any], k: jax.Array) -> None:
    """The producer has filled the k-th stage of a block, and hands the one before it over.

    Args:
      barrier: that of a stage, given its number.
      k: int32 scalar.
    """
    if not engine.current().has_tma:
        row_copies.await_rows(lag=1)
        plgpu.barrier_arrive(barrier(jnp.maximum(k - 1, 0)), predicate=k > 0)


def hand_over_last(barrier: Callable[[Any], Any], stages: int) -> None:
    """The producer hands over the last one of so many stages."""
    if not engine.current().has_tma:
        row_copies.await_rows(lag=0)
        plgpu.barrier_arrive(barrier(stages - 1))


def commit() -> None:
    """What the warpgroup has stored to SMEM can be copied from there."""
    plgpu.commit_smem() if engine.current().has_tma else warpgroup.barrier()


def store(buffer, target, index: tuple, transforms: tuple | None = None) -> None:
    """The warpgroup starts to copy SMEM to `target[index]` (GMEM), but for what lies outside.

    Args:
      buffer: with `transforms`; None: `tiled`.
      target: GMEM.
      index: scalars, and slices of the last two axes.
      transforms: of buffers with rows of 128 bytes.
    """
    if engine.current().has_tma:
        plgpu.copy_smem_to_gmem(buffer, target.at[index])
        return
    *outer, rows, columns = index
    matrix = target.at[tuple(outer)] if outer else target
    if transforms is None:
        transforms = tiled(buffer.dtype, buffer.shape[1])
    _store(buffer, matrix, jnp.int32(rows.start), jnp.int32(columns.start), transforms)


def await_reads(most: int) -> None:
    """Waits until all but so many copies have been read."""
    if engine.current().has_tma:
        plgpu.wait_smem_to_gmem(most, wait_read_only=True)
    else:
        warpgroup.barrier()


def await_stores(most: int) -> None:
    """Waits until all but so many copies have ended."""
    if engine.current().has_tma:
        plgpu.wait_smem_to_gmem(most)


def write(array: jax.Array, buffer, target, index: tuple) -> None:
    """The warpgroup starts to copy an array through its only buffer in SMEM to `target[index]`."""
    await_reads(0)
    buffer[...] = array
    commit()
    store(buffer, target, index)


@primitive
def _store(buffer_ref, target_ref, first_row, first_column, transforms: tuple) -> None:
    """The warpgroup copies `buffer_ref` (SMEM) to a part of `target_ref` (GMEM matrix)."""
    (rows, columns), (m, d) = buffer_ref.shape, target_ref.shape
    size = jnp.dtype(buffer_ref.dtype).itemsize
    row_bytes = min(columns * size, 128)  # of a tile
    swizzle = {128: 0, 64: 1, 32: 2}[row_bytes]
    chunks, tile_chunks = columns * size // _CHUNK, row_bytes // _CHUNK
    buffer_type = plgpu.RefType(transforms)

    @plgpu.inline_mgpu(arg_types=(buffer_type, plgpu.RefType(), SCALAR, SCALAR))
    def step(_, buffer_ref, target_ref, first_row, first_column):
        base, i32 = simt.smem_address(buffer_ref), ir.IntegerType.get_signless(32)
        first_row, first_column = (a.registers.item() for a in (first_row, first_column))
        for start in range(0, rows * chunks, _LANES):
            place = arith.addi(simt.thread(), const(start))
            row, chunk = (f(place, const(chunks)) for f in (arith.divui, arith.remui))
            tile = arith.muli(arith.shrui(row, const(3)), const(chunks // tile_chunks))
            tile = arith.addi(tile, arith.divui(chunk, const(tile_chunks)))
            row_in_tile = arith.andi(row, const(7))
            swizzled = arith.xori(
                arith.remui(chunk, const(tile_chunks)), arith.shrui(row_in_tile, const(swizzle))
            )
            source = arith.addi(arith.muli(tile, const(8)), row_in_tile)
            source = arith.addi(base, arith.muli(source, const(row_bytes)))
            source = arith.addi(source, arith.muli(swizzled, const(_CHUNK)))
            words = mgpu.utils.inline_ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
                source,
                result_types=[i32] * 4,
                has_side_effects=True,
            )
            my_row = arith.addi(first_row, row)
            my_column = arith.addi(first_column, arith.muli(chunk, const(_CHUNK // size)))
            inside = arith.andi(simt.less(my_row, const(m)), simt.less(my_column, const(d)))
            address, _ = simt.element_address(target_ref, my_row, my_column, size)
            simt.store_chunk(address, 0, list(words), inside)

    step(buffer_ref, target_ref, first_row, first_column)


@_store.in_jax
def _(buffer_ref, target_ref, first_row, first_column, transforms):
    del transforms
    rows, columns = buffer_ref.shape
    plgpu.commit_smem()
    part = target_ref.at[pl.ds(first_row, rows), pl.ds(first_column, columns)]
    plgpu.copy_smem_to_gmem(buffer_ref, part)
    plgpu.wait_smem_to_gmem(0)

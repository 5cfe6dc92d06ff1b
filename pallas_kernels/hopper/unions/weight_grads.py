"""Gradients of weights on neuron lists: `values^T @ x[tokens]` for each group of 64 neurons.

The gradients for the gate and for the up projection share x, and so its gathered rows; each
consumer computes one of the two. For a single gradient, each consumer computes half of the columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import support
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS, STAGE_K
from pallas_kernels.hopper.unions import gathered_matmul, row_copies
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS

_COLUMNS = 256  # columns of x in a job


class _Job(NamedTuple):
    """Columns of the gradients for a group of neurons.

    Attributes:
      group: the number of the group, whose list is summed over.
      start, length: of its list.
      column: the first of 256 columns of x.
    """

    group: jax.Array
    start: jax.Array
    length: jax.Array
    column: jax.Array


class _Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
      order, starts, lengths, tokens: of the lists.
      values: one or two `[C, 64]`.
      x: `[M, D]`.
    """

    order: Any
    starts: Any
    lengths: Any
    tokens: Any
    values: tuple
    x: Any


def weight_grads(
    values: tuple[jax.Array, ...], x: jax.Array, lists: NeuronLists
) -> tuple[jax.Array, ...]:
    """Sums `values[i][s, n] x[tokens[s]]` over the slots s of each list, in float32.

    Args:
      values: one or two arrays `[C, 64]` in the dtype of x: the entries of each slot's token for
        the 64 neurons of its list; zeros from a list's end to the next multiple of 64. Slots after
        the last list are not used.
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      lists: H / 64 of them, H a multiple of 128 up to 65536. The tokens in padding are not used.

    Returns:
      `[H, D]` for each of the values, in the dtype of x, rounded once: row 64 b + n is the sum over
      list b with column n of the values; zeros where a list is empty.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    (capacity,), (groups,) = lists.tokens.shape, lists.lengths.shape
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"x must be [M, D] with at least one row, got {list(x.shape)}")
    if not 1 <= len(values) <= CONSUMERS:
        raise ValueError(f"values must be one or two arrays, got {len(values)}")
    out_type = jax.ShapeDtypeStruct((groups * GROUP_NEURONS, x.shape[1]), x.dtype)
    support.check_weight("a weight to go with x and lists", out_type)
    for i, value in enumerate(values):
        support.check_array(f"values[{i}]", value, (capacity, GROUP_NEURONS), x.dtype)
    return gathered_matmul.gathered_matmul(
        _Operands(lists.order, lists.starts, lists.lengths, lists.tokens, values, x),
        job_type=_Job,
        jobs=lambda _: jnp.int32(groups * pl.cdiv(x.shape[1], _COLUMNS)),
        describe=_describe,
        produce=_produce,
        consume=_consume,
        a_shape=(STAGE_K, _COLUMNS),
        b_shape=(len(values) * STAGE_K, GROUP_NEURONS),
        b_copies=len(values),
        dtype=x.dtype,
        out_type=(out_type,) * len(values),
        name="weight_grads",
    )


def _describe(i, operands):
    columns = pl.cdiv(operands.x.shape[1], _COLUMNS)
    group = operands.order[i // columns]  # long jobs first
    return _Job(group, operands.starts[group], operands.lengths[group], i % columns * _COLUMNS)


def _produce(job, ring, step, operands):
    *_, tokens, values, x = operands

    def indices_of(k):
        first = jnp.minimum(job.start + k * STAGE_K, tokens.shape[0] - STAGE_K)
        return tokens.at[pl.ds(first, STAGE_K)]

    def fill(k, indices, a, b, loaded):
        for n, value in enumerate(values):
            entries = value.at[pl.ds(job.start + k * STAGE_K, STAGE_K)]
            plgpu.copy_gmem_to_smem(entries, b.at[pl.ds(n * STAGE_K, STAGE_K)], loaded)
        row_copies.gather_rows(x, indices, job.length - k * STAGE_K, job.column, a)

    return ring.put_lists(step, pl.cdiv(job.length, STAGE_K), indices_of, fill)


def _consume(job, ring, step, warpgroup, buffers, operands, *grads):
    column, steps = job.column, pl.cdiv(job.length, STAGE_K)
    columns = _COLUMNS * len(grads) // CONSUMERS
    if len(grads) == 1:
        mine = pl.ds(warpgroup * columns, columns)
        column += warpgroup * columns

        def wgmma(acc, a, b):
            plgpu.wgmma(acc, b.T, a.at[:, mine])
    else:
        mine = pl.ds(warpgroup * STAGE_K, STAGE_K)

        def wgmma(acc, a, b):
            plgpu.wgmma(acc, b.at[mine].T, a)

    sums = ring.multiply(step, steps, wgmma, columns=columns)

    def write(grad):
        for part in range(columns // ACC_ROWS):
            array = sums[:, part * ACC_ROWS : (part + 1) * ACC_ROWS].astype(grad.dtype)
            target = grad.at[
                pl.ds(job.group * GROUP_NEURONS, GROUP_NEURONS),
                pl.ds(column + part * ACC_ROWS, ACC_ROWS),
            ]
            gathered_matmul.write([array], buffers, part, [target])

    if len(grads) == 1:
        write(*grads)
    else:
        lax.cond(warpgroup == 0, lambda: write(grads[0]), lambda: write(grads[1]))
    return step + steps

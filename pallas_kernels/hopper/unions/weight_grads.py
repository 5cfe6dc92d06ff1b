"""Gradients of weights on neuron lists: `values^T @ x[tokens]` for each group of 64 neurons.

The gradients for the gate and for the up projection share x, and so its gathered rows; each
consumer computes one of the two. For a single gradient, each consumer computes half of the columns.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.common import copies, engine, row_copies, support
from pallas_kernels.hopper.common.engine import Factor
from pallas_kernels.hopper.common.tiles import CONSUMERS
from pallas_kernels.hopper.unions import gathered_matmul
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS

_COLUMNS = 256  # of x in a job


class _Job(NamedTuple):
    """Columns of the gradients for a group of neurons.

    Attributes:
      group: the number of the group, whose list is summed over.
      start, length: of its list.
      column: the first of its columns of x.
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
    stage_k = engine.current().stage_k(x.dtype)
    return gathered_matmul.gathered_matmul(
        _Operands(lists.order, lists.starts, lists.lengths, lists.tokens, values, x),
        job_type=_Job,
        jobs=lambda _: jnp.int32(groups * pl.cdiv(x.shape[1], _COLUMNS)),
        describe=_describe,
        produce=_produce,
        consume=_consume,
        a_shape=(stage_k, _COLUMNS),
        b_shape=(len(values) * stage_k, GROUP_NEURONS),
        b_copies=len(values),
        dtype=x.dtype,
        out_type=(out_type,) * len(values),
        name="weight_grads",
    )


def _describe(i, operands):
    parts = pl.cdiv(operands.x.shape[1], _COLUMNS)
    group = operands.order[i // parts]  # long jobs first
    return _Job(group, operands.starts[group], operands.lengths[group], i % parts * _COLUMNS)


def _produce(job, ring, step, operands):
    *_, tokens, values, x = operands
    stage_k = ring.a.shape[1]

    def indices_of(k):
        first = jnp.minimum(job.start + k * stage_k, tokens.shape[0] - stage_k)
        return tokens.at[pl.ds(first, stage_k)]

    def fill(k, indices, a, b, loaded):
        for n, value in enumerate(values):
            mine = pl.ds(job.start + k * stage_k, stage_k), pl.ds(0, GROUP_NEURONS)
            copies.load(value, mine, b.at[pl.ds(n * stage_k, stage_k)], loaded)
        row_copies.gather_rows(x, indices, job.length - k * stage_k, job.column, a)

    return ring.put_lists(step, pl.cdiv(job.length, stage_k), indices_of, fill)


def _consume(job, ring, step, warpgroup, buffers, operands, *grads):
    stage_k, width = ring.a.shape[1], engine.current().part
    column, steps = job.column, pl.cdiv(job.length, stage_k)
    columns = _COLUMNS * len(grads) // CONSUMERS
    if len(grads) == 1:
        mine = pl.ds(warpgroup * columns, columns)
        column += warpgroup * columns

        def factors(a, b):
            return Factor(b, 0), Factor(a.at[:, mine], 0)
    else:
        mine = pl.ds(warpgroup * stage_k, stage_k)

        def factors(a, b):
            return Factor(b.at[mine], 0), Factor(a, 0)

    sums = ring.multiply(step, steps, factors, buffers.free, columns=columns)

    def write(grad):
        for part in range(columns // width):
            array = sums[:, part * width : (part + 1) * width].astype(grad.dtype)
            rows = pl.ds(job.group * GROUP_NEURONS, GROUP_NEURONS)
            target = grad, (rows, pl.ds(column + part * width, width))
            buffers.write([array], part, [target])

    if len(grads) == 1:
        write(*grads)
    else:
        lax.cond(warpgroup == 0, lambda: write(grads[0]), lambda: write(grads[1]))
    return step + steps

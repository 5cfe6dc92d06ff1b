"""Gradients of weights on neuron lists: `values^T @ x[tokens]` for each block of 64 neurons.

Two gradients that share x, those of the gate and of the up projection, share its gathered rows,
each computed by one of the consumers. With a single one, either computes half of the columns.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import operands
from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.hopper.frames.gathered_matmul import CONSUMERS, ROWS, STEP
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP

_COLUMNS = 256  # of x in a job


def weight_grads_reference(values, x, lists):
    """Pure-JAX meaning of `weight_grads`."""
    slot = jnp.arange(len(lists.tokens))

    def block(start_and_length):
        start, length = start_and_length
        keep = ((slot >= start) & (slot < start + length))[:, None]
        rows = jnp.where(keep, x[lists.tokens], 0)
        return tuple(
            jnp.einsum("sn,sd->nd", jnp.where(keep, v, 0), rows, preferred_element_type=jnp.float32)
            for v in values
        )

    grads = lax.map(block, (lists.starts, lists.lengths))
    return tuple(grad.reshape(-1, x.shape[1]).astype(x.dtype) for grad in grads)


def weight_grads(
    values: tuple[jax.Array, ...], x: jax.Array, lists: NeuronLists
) -> tuple[jax.Array, ...]:
    """Sums `values[i][s, n] x[tokens[s]]` over the slots s of each list, in float32.

    Args:
      values: one or two arrays `[C, 64]` in the dtype of x: the entries of each slot's token for
        the 64 neurons of its list; zeros from a list's end to the next multiple of 64. Slots after
        the last list are not used.
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      lists: of H / 64 blocks, H a multiple of 128 up to 65536. The tokens in padding are not used.

    Returns:
      `[H, D]` for each of the values, in the dtype of x, rounded once: row 64 b + n is the sum over
      list b with column n of the values; zeros where a list is empty.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    (capacity,), (blocks,) = lists.tokens.shape, lists.lengths.shape
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"x must be [M, D] with at least one row, got {list(x.shape)}")
    if not 1 <= len(values) <= CONSUMERS:
        raise ValueError(f"values must be one or two arrays, got {len(values)}")
    out_type = jax.ShapeDtypeStruct((blocks * GROUP, x.shape[1]), x.dtype)
    operands.check_weight("a weight to go with x and lists", out_type)
    for i, value in enumerate(values):
        operands.check_array(f"values[{i}]", value, (capacity, GROUP), x.dtype)
    return gathered_matmul.gathered_matmul(
        _describe,
        _produce,
        _consume,
        jnp.argsort(lists.lengths, descending=True).astype(jnp.int32),  # so the last jobs are short
        lists.starts,
        lists.lengths,
        lists.tokens,
        values,
        x,
        jobs=lambda order, *_: jnp.int32(order.shape[0] * pl.cdiv(x.shape[1], _COLUMNS)),
        a_shape=(STEP, _COLUMNS),
        b_shape=(len(values) * STEP, GROUP),
        b_copies=len(values),
        out_type=(out_type,) * len(values),
        name="weight_grads",
    )


def _describe(i, order, starts, lengths, tokens, values, x, *grads):
    """Block, its list's start and length, and the first column of x."""
    columns = pl.cdiv(x.shape[1], _COLUMNS)
    block = order[i // columns]
    return block, starts[block], lengths[block], i % columns * _COLUMNS


def _produce(job, ring, step, order, starts, lengths, tokens, values, x, *_):
    _, start, length, column = job

    def indices_of(k):
        first = jnp.minimum(start + k * STEP, tokens.shape[0] - STEP)
        return tokens.at[pl.ds(first, STEP)]

    def fill(k, indices, a, b, loaded):
        for n, value in enumerate(values):
            entries = value.at[pl.ds(start + k * STEP, STEP)]
            plgpu.copy_gmem_to_smem(entries, b.at[pl.ds(n * STEP, STEP)], loaded)
        gathered_matmul.gather_rows(x, indices, length - k * STEP, column, a)

    return ring.put_lists(step, pl.cdiv(length, STEP), indices_of, fill)


def _consume(job, ring, step, warpgroup, buffers, *refs):
    _, _, _, _, values, _, *grads = refs
    block, _, length, column = job
    steps = pl.cdiv(length, STEP)
    columns = _COLUMNS * len(values) // CONSUMERS
    if len(values) == 1:
        mine = pl.ds(warpgroup * columns, columns)
        column += warpgroup * columns

        def wgmma(acc, a, b):
            plgpu.wgmma(acc, b.T, a.at[:, mine])
    else:
        mine = pl.ds(warpgroup * STEP, STEP)

        def wgmma(acc, a, b):
            plgpu.wgmma(acc, b.at[mine].T, a)

    sums = ring.multiply(step, steps, wgmma, columns=columns)

    def write(grad):
        for part in range(columns // ROWS):
            array = sums[:, part * ROWS : (part + 1) * ROWS].astype(grad.dtype)
            target = grad.at[pl.ds(block * GROUP, GROUP), pl.ds(column + part * ROWS, ROWS)]
            gathered_matmul.write(array, buffers.at[part % 2], target)

    if len(grads) == 1:
        write(*grads)
    else:
        lax.cond(warpgroup == 0, lambda: write(grads[0]), lambda: write(grads[1]))
    return step + steps

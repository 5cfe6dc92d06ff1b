"""Gradients of a block's weights on neuron lists: `entries^T @ rows` for each block of 64 neurons.

Products with x and with dy are jobs of one kernel, because they wait for different things. The
gradients for the gate and for the up projection share rows of x: each consumer computes one of the
two, and the tensor cores are busy. For a single product each consumer computes half of the columns,
and both wait for rows from L2.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import support
from pallas_kernels.hopper.device import row_copies
from pallas_kernels.hopper.device.tiles import ACC_ROWS, CONSUMERS, STAGE_K
from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS

_COLUMNS = 256  # columns of x or dy in a job


def weight_grads(
    entries: tuple[jax.Array, ...], x: jax.Array, dy: jax.Array, lists: NeuronLists
) -> tuple[jax.Array, ...]:
    """Sums `entries[i][s, n] rows[tokens[s]]` over the slots s of each list, in float32.

    Args:
      entries: two or three arrays `[C, 64]` in the dtype of x, as `hidden_grads` returns them: h,
        whose rows are those of dy, and the gradients for its factors, whose rows are those of x. A
        slot holds the entries of its token for the 64 neurons of its list, and zeros from the
        list's end to the next multiple of 64. Slots after the last list are not used.
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      dy: like x.
      lists: H / 64 of them, H a multiple of 128 up to 65536. The tokens in padding are not used.

    Returns:
      `[H, D]` for each of the entries, in the dtype of x, rounded once: row 64 b + n is the sum
      over list b with column n of the entries; zeros where a list is empty.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    (capacity,), (blocks,) = lists.tokens.shape, lists.lengths.shape
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"x must be [M, D] with at least one row, got {list(x.shape)}")
    if not 1 < len(entries) <= 1 + CONSUMERS:
        raise ValueError(f"entries must be two or three arrays, got {len(entries)}")
    out_type = jax.ShapeDtypeStruct((blocks * GROUP_NEURONS, x.shape[1]), x.dtype)
    support.check_weight("a weight to go with x and lists", out_type)
    support.check_array("dy", dy, x.shape, x.dtype)
    for i, entry in enumerate(entries):
        support.check_array(f"entries[{i}]", entry, (capacity, GROUP_NEURONS), x.dtype)
    most = len(entries) - 1  # products of a job
    return gathered_matmul.gathered_matmul(
        _describe,
        _produce,
        _consume,
        lists.order,  # long jobs first
        lists.starts,
        lists.lengths,
        lists.tokens,
        entries,
        x,
        dy,
        jobs=lambda order, *_: jnp.int32(order.shape[0] * _jobs_of_list(x)),
        a_shape=(STAGE_K, _COLUMNS),
        b_shape=(most * STAGE_K, GROUP_NEURONS),
        b_copies=most,
        out_type=(out_type,) * len(entries),
        name="weight_grads",
    )


def _jobs_of_list(x) -> int:
    return 2 * pl.cdiv(x.shape[1], _COLUMNS)


def _describe(i, order, starts, lengths, tokens, entries, x, *_):
    """The block of neurons, the start and the length of its list, and which of the list's jobs.

    Even ones are products with x, odd ones with dy, so that there are always both to do.
    """
    block, job = order[i // _jobs_of_list(x)], i % _jobs_of_list(x)
    return block, starts[block], lengths[block], job


def _rows_and_column(job):
    """Whether the rows are those of dy, and the first of their columns."""
    return job[3] % 2 == 1, job[3] // 2 * _COLUMNS


def _produce(job, ring, step, order, starts, lengths, tokens, entries, x, dy, *_):
    _, start, length, _ = job
    is_of_dy, column = _rows_and_column(job)
    h, *grads = entries

    def indices_of(k):
        first = jnp.minimum(start + k * STAGE_K, tokens.shape[0] - STAGE_K)
        return tokens.at[pl.ds(first, STAGE_K)]

    def put(rows, sources):
        """Stages get `rows`, and from each of `(array, first slot, slots)` a part of b."""

        def fill(k, indices, a, b, loaded):
            filled = 0
            for array, first, slots in sources:
                part = array.at[pl.ds(start + k * STAGE_K + first, slots)]
                plgpu.copy_gmem_to_smem(part, b.at[pl.ds(filled, slots)], loaded)
                filled += slots
            row_copies.gather_rows(rows, indices, length - k * STAGE_K, column, a)

        return ring.put_lists(step, pl.cdiv(length, STAGE_K), indices_of, fill)

    # A stage waits for as many copies in either case.
    slots = STAGE_K // len(grads)
    of_h = [(h, n * slots, slots) for n in range(len(grads))]
    of_grads = [(grad, 0, STAGE_K) for grad in grads]
    return lax.cond(is_of_dy, lambda: put(dy, of_h), lambda: put(x, of_grads))


def _consume(job, ring, step, warpgroup, buffers, *refs):
    _, _, _, _, _, _, _, of_h, *of_factors = refs
    block, _, length, _ = job
    is_of_dy, column = _rows_and_column(job)
    steps = pl.cdiv(length, STAGE_K)

    def write(sums, first_column, grad):
        for part in range(sums.shape[1] // ACC_ROWS):
            array = sums[:, part * ACC_ROWS : (part + 1) * ACC_ROWS].astype(grad.dtype)
            target = grad.at[
                pl.ds(block * GROUP_NEURONS, GROUP_NEURONS),
                pl.ds(first_column + part * ACC_ROWS, ACC_ROWS),
            ]
            gathered_matmul.write([array], buffers, part, [target])

    def share_columns(grad):
        columns = _COLUMNS // CONSUMERS
        first = warpgroup * columns

        def wgmma(acc, a, b):
            plgpu.wgmma(acc, b.at[pl.ds(0, STAGE_K)].T, a.at[:, pl.ds(first, columns)])

        write(ring.multiply(step, steps, wgmma, columns=columns), column + first, grad)

    def share_products(of_gate, of_up):
        def wgmma(acc, a, b):
            plgpu.wgmma(acc, b.at[pl.ds(warpgroup * STAGE_K, STAGE_K)].T, a)

        sums = ring.multiply(step, steps, wgmma, columns=_COLUMNS)
        lax.cond(
            warpgroup == 0,
            lambda: write(sums, column, of_gate),
            lambda: write(sums, column, of_up),
        )

    of_x = share_products if len(of_factors) > 1 else share_columns
    lax.cond(is_of_dy, lambda: share_columns(of_h), lambda: of_x(*of_factors))
    return step + steps

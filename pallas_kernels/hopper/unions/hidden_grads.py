"""Gradients for the products z and u behind h on tile unions, from `dh = dy @ w_down^T`.

The matmul is an up projection of dy. Its epilogue computes dz = dh u act'(z) and du = dh g
(`rectifiers`). It may overwrite g and h with them, for the gradient for x, and scatters them and h
into the neuron lists (`list_entries`), if there are any, for the gradients for the weights.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import in_place
from pallas_kernels.hopper.common import copies, engine, support
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS
from pallas_kernels.hopper.unions import gathered_matmul, list_entries
from pallas_kernels.hopper.unions.union_up import Item, describe_item
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS, Plan
from pallas_kernels.rectifiers import RELU, Rectifier


class _Operands(NamedTuple):
    """What the kernel reads, and what it changes.

    Attributes:
      item_count, items, neurons, sizes: of the plan.
      l1_grad: float32 `[1]`.
      list_words: `NeuronLists.words`; None without lists.
      entries: `[C, 64]` for h and each gradient, to be filled; none without lists.
      extra: `[items, 128, 256]`, or None.
      hidden: `[items, 128 or 256, 256]`, to be overwritten if there is no `into`.
      into: likewise, for the gradients; or None.
      dy: `[M rounded up to a multiple of 8, D]`.
      w_down: `[H, D]`.
    """

    item_count: Any
    items: Any
    neurons: Any
    sizes: Any
    l1_grad: Any
    list_words: Any
    entries: list
    extra: Any
    hidden: Any
    into: Any
    dy: Any
    w_down: Any

    @property
    def arrays_of_a_part(self) -> list:
        """What a part takes stages of, in this order."""
        return [self.hidden] if self.extra is None else [self.extra, self.hidden]


def hidden_grads(
    dy: jax.Array,
    w_down: jax.Array,
    h_ref: jax.Ref | jax.Array,
    l1_grad: jax.Array,
    plan: Plan,
    lists: NeuronLists | None,
    rectifier: Rectifier = RELU,
    extra: jax.Array | None = None,
    into: jax.Ref | None = None,
) -> tuple[jax.Array, ...]:
    """Computes the gradients for z and u, in place of gates and h or into another array; scatters
    these and h into the lists.

    Sums in float32; the gradients are rounded once, and are 0 where the gate is 0.

    Args:
      dy: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_down: `[H, D]`, H a multiple of 128 up to 65536.
      h_ref: `[items, 256, 256]`, in the non-gated form `[items, 128, 256]`: h, with the gates above
        it, as `union_up` returns it; mutable if there is no `into`.
      l1_grad: float32 `[1]`, the gradient for the sum of |h|.
      plan: the unions.
      lists: with C slots; they hold at least the non-zeros of the gate. None: nothing is listed.
      rectifier: what made the gate.
      extra: `[items, 128, 256]`, in chunks like h, what the gradient for h has besides; finite also
        outside the unions. None: nothing.
      into: mutable, of the shape and dtype of `h_ref`: takes the gradients. None: `h_ref` does.

    Returns:
      h, dz and, in the gated form, du: `[C, 64]` each, on the lists; zeros elsewhere up to the end
      of the last list, rounded up to 64 slots, and unspecified after it. Nothing without lists.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_down", w_down)
    support.check_array("dy", dy, (dy.shape[0], w_down.shape[1]), w_down.dtype)
    support.check_array(
        "plan.neurons", plan.neurons, (pl.cdiv(dy.shape[0], TILE_TOKENS), len(w_down)), jnp.int32
    )
    support.check_array("l1_grad", l1_grad, (1,), jnp.float32)
    rows = h_ref.shape[1]
    if rows not in (CHUNK_NEURONS, 2 * CHUNK_NEURONS):
        raise ValueError(f"h_ref must be [items, 128 or 256, 256], got {list(h_ref.shape)}")
    support.check_array("h_ref", h_ref, (plan.items.size, rows, TILE_TOKENS), w_down.dtype)
    if into is not None:
        support.check_array("into", into, h_ref.shape, h_ref.dtype)
    if extra is not None:
        blocks = plan.items.size, CHUNK_NEURONS, TILE_TOKENS
        support.check_array("extra", extra, blocks, w_down.dtype)
    dy = jnp.pad(dy, ((0, -dy.shape[0] % 8), (0, 0)))  # for the tiling of its copies
    given = plan, lists, l1_grad, extra, dy, w_down
    plan, lists, l1_grad, extra, dy, w_down = in_place.barrier(given)
    if into is not None:
        h_ref = in_place.barrier(h_ref)
    entries = []
    if lists is not None:
        zeros = list_entries.zeros(lists, 1 + rows // CHUNK_NEURONS, w_down.dtype)
        entries = [in_place.mutable(a) for a in zeros]
    stage_k = engine.current().stage_k(dy.dtype)
    gathered_matmul.gathered_matmul(
        _Operands(
            plan.item_count,
            plan.items,
            plan.neurons,
            plan.sizes,
            l1_grad,
            lists and lists.words,
            entries,
            extra,
            h_ref,
            into,
            dy,
            w_down,
        ),
        job_type=Item,
        jobs=lambda operands: operands.item_count[0],
        describe=functools.partial(describe_item, 1),
        produce=_produce,
        consume=functools.partial(_consume, rectifier),
        a_shape=(CONSUMERS * ACC_ROWS, stage_k),
        b_shape=(TILE_TOKENS, stage_k),
        dtype=w_down.dtype,
        out_type=(),
        name="hidden_grads",
    )
    return tuple(in_place.contents(entry) for entry in entries)


def _produce(job, ring, step, operands):
    chunk, width = pl.ds(job.first, CHUNK_NEURONS), engine.current().part
    indices = ring.load_indices(operands.neurons.at[job.tile, chunk])

    def put_part(part, step):
        for array in operands.arrays_of_a_part:

            def fill(_, b, loaded, array=array):
                rows = pl.ds(0, array.shape[1])
                mine = job.job, rows, pl.ds(part * width, width)
                copies.load(array, mine, b.at[rows], loaded)

            ring.put(step, fill)
            step += 1
        return step

    first_row = job.tile * TILE_TOKENS
    step = ring.put_product(step, operands.dy, first_row, operands.w_down, indices, job.limit)
    return lax.fori_loop(0, TILE_TOKENS // width, put_part, step)


def _consume(rectifier, job, ring, step, warpgroup, buffers, operands):
    hidden, dtype, list_words = operands.hidden, operands.dy.dtype, operands.list_words
    into = hidden if operands.into is None else operands.into
    first_word, width = job.tile * TILE_TOKENS // 32, engine.current().part
    parts, words_of_a_part = TILE_TOKENS // width, width // 32
    if operands.entries:
        mine = pl.ds(job.first + warpgroup * ACC_ROWS, ACC_ROWS)
        neurons = list_entries.load_neurons(operands.neurons.at[job.tile, mine])
        # Words of a part are loaded before something long, as the fences of writes wait for loads.
        next_words = list_entries.load_words(list_words, neurons, first_word, words_of_a_part)
    l1 = operands.l1_grad[0]
    steps = operands.dy.shape[1] // ring.b.shape[2]
    products = ring.multiply_product(step, steps, warpgroup, job.limit, buffers.free)
    step += steps
    taken = len(operands.arrays_of_a_part)  # stages of a part
    starts = [first + warpgroup * ACC_ROWS for first in range(0, hidden.shape[1], CHUNK_NEURONS)]
    for part in range(parts):
        first_stage = step + taken * part
        dh = products[:, part * width : (part + 1) * width]
        if operands.extra is not None:  # before gates and h, as these need registers
            _, b = ring.take(first_stage)
            dh += b[pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)].astype(jnp.float32)
        _, b = ring.take(first_stage + taken - 1)
        *gate, value = [b[pl.ds(start, ACC_ROWS)].astype(jnp.float32) for start in starts]
        grads = rectifier.gradients(dh, gate[0] if gate else None, value, l1)
        grads = [a.astype(dtype) for a in grads]
        columns = pl.ds(part * width, width)
        targets = [(into, (job.job, pl.ds(start, ACC_ROWS), columns)) for start in starts]
        written = buffers.write(grads, part, targets)
        if operands.entries:
            words = next_words
            if part + 1 < parts:
                next_word = first_word + (part + 1) * words_of_a_part
                next_words = list_entries.load_words(
                    list_words, neurons, next_word, words_of_a_part
                )
            places = [b.at[pl.ds(starts[-1], ACC_ROWS)], *written]
            arrays = [value.astype(dtype), *grads]
            list_entries.scatter(operands.entries, neurons, words, arrays, places)
        for stage in range(taken):  # after the fence of the writes, as TMA will fill them again
            ring.release(first_stage + stage)
    return step + taken * parts

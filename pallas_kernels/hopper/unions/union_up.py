"""Up projection on tile unions: `h = g * (x @ w_up[neurons]^T)` for each row tile.

For 128 neurons of a tile's union this is one dense matmul with gathered rows. The gates of these
neurons, gathered too, follow the weights through the ring, of a few tokens at a time
(`Engine.part`). If there are few tokens, two jobs share those of a tile.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels import quantised
from pallas_kernels.hopper.common import copies, engine, row_copies, scales, support
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS
from pallas_kernels.hopper.unions import gathered_matmul
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS, Plan
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier


class Item(NamedTuple):
    """A job: the neurons of an item of the plan, with all tokens of its row tile or some of them.

    Attributes:
      job: its number; that of the item if it has all tokens.
      tile: the row tile.
      first: where the item's neurons begin in the tile's union.
      limit: how many neurons the union has from there on.
    """

    job: jax.Array
    tile: jax.Array
    first: jax.Array
    limit: jax.Array


class _Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
      item_count, items, neurons, sizes: of the plan.
      scale: the scales of x and of w_up, if these are in 8 bits.
      x: `[M rounded up to a multiple of 8, D]`.
      w_up: `[H, D]`; None in the non-gated form.
      gate: `[R, H, 256]`.
    """

    item_count: Any
    items: Any
    neurons: Any
    sizes: Any
    scale: Any
    x: Any
    w_up: Any
    gate: Any


def union_up(
    x: Operand,
    gate: jax.Array,
    w_up: Operand | None,
    plan: Plan,
    rectifier: Rectifier = RELU,
    *,
    with_gate: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Computes h, the gates times `x . w_up[n]`, for the neurons n in each tile's union.

    In the non-gated form h is the gate. Sums as `gate_union` does, and rounds once.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      gate: `[R, H, 256]` as `gate_union` returns it, R = ceil(M / 256).
      w_up: `[H, D]`, H a multiple of 128 up to 65536. None for the non-gated form. If it is
        `Quantised`, with a scale for each row, x is, too, and D is a multiple of 128.
      plan: the unions.
      rectifier: what made the gate; it may pass `x . w_up[n]` through a ReLU.
      with_gate: return the gates, too, for gradients.

    Returns:
      h: `[items, 128, 256]`, the chunk of each item; zeros past the union's size, unspecified from
        `item_count` on. In the gated form with gates: `[items, 256, 256]`, their chunk above that
        of h.
      l1: float32 scalar, the sum of |h| before rounding.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    m, h = x.shape[0], plan.neurons.shape[1]
    support.check_weight(
        "a weight to go with x and plan", jax.ShapeDtypeStruct((h, x.shape[1]), gate.dtype)
    )
    if w_up is not None:
        support.check_operand("w_up", w_up, (h, x.shape[1]), x)
    support.check_array("gate", gate, (pl.cdiv(m, TILE_TOKENS), h, TILE_TOKENS), gate.dtype)
    left, right, scale = quantised.unscaled(x, w_up)
    left = jnp.pad(left, ((0, -m % 8), (0, 0)))  # for the tiling of its copies
    if scale is not None:
        scale = scales.padded(scale[0], TILE_TOKENS), scale[1]
    (items,) = plan.items.shape
    rows = 2 * CHUNK_NEURONS if with_gate and w_up is not None else CHUNK_NEURONS
    tokens = gathered_matmul.job_tokens(len(plan.sizes))
    shares, stage_k = TILE_TOKENS // tokens, engine.current().stage_k(left.dtype)
    hidden, l1 = gathered_matmul.gathered_matmul(
        _Operands(plan.item_count, plan.items, plan.neurons, plan.sizes, scale, left, right, gate),
        job_type=Item,
        jobs=lambda operands: shares * operands.item_count[0],
        describe=functools.partial(describe_item, shares),
        produce=functools.partial(_produce, tokens),
        consume=functools.partial(_consume, tokens, rectifier),
        a_shape=(CONSUMERS * ACC_ROWS, stage_k),
        b_shape=(tokens, stage_k),
        dtype=gate.dtype,
        stage_dtype=left.dtype,
        out_type=(
            jax.ShapeDtypeStruct((items, rows, TILE_TOKENS), gate.dtype),
            jax.ShapeDtypeStruct((shares * items, CHUNK_NEURONS), jnp.float32),
        ),
        name="union_up",
    )
    is_computed = (jnp.arange(shares * items) < shares * plan.item_count)[:, None]
    return hidden, jnp.sum(l1, where=is_computed)


def describe_item(shares, i, operands) -> Item:
    """The i-th job; `shares` jobs have an item in common."""
    chunks = operands.neurons.shape[1] // CHUNK_NEURONS
    item = operands.items[i // shares]
    tile, first = item // chunks, item % chunks * CHUNK_NEURONS
    return Item(i, tile, first, operands.sizes[tile] - first)


def item_and_first_token(i, tokens):
    """The item of the i-th job, and its first token in the tile."""
    shares = TILE_TOKENS // tokens
    return i // shares, i % shares * tokens


def _produce(tokens, job, ring, step, operands):
    i, tile, first, limit = job
    _, first_token = item_and_first_token(i, tokens)
    width = engine.current().part
    indices = ring.load_indices(operands.neurons.at[tile, pl.ds(first, CHUNK_NEURONS)])

    def put_gates(part, step):
        def fill(a, _, loaded):
            copies.arrive_without(loaded)
            column = first_token + part * width
            row_copies.gather_rows(operands.gate.at[tile], indices, limit, column, a)

        ring.in_16_bits().put(step, fill)
        return step + 1

    if operands.w_up is not None:
        first_row = tile * TILE_TOKENS + first_token
        step = ring.put_product(step, operands.x, first_row, operands.w_up, indices, limit)
    return lax.fori_loop(0, tokens // width, put_gates, step)


def _consume(tokens, rectifier, job, ring, step, warpgroup, buffers, operands, hidden, l1):
    i, tile, first, limit = job
    item, first_token = item_and_first_token(i, tokens)
    mine, width = pl.ds(warpgroup * ACC_ROWS, ACC_ROWS), engine.current().part
    parts = tokens // width
    if operands.w_up is not None:
        steps = operands.x.shape[1] // ring.b.shape[2]
        products = ring.multiply_product(step, steps, warpgroup, limit, buffers.free)
        step += steps
    if operands.scale is not None:
        of_tokens, of_neurons = operands.scale
        neurons = operands.neurons.at[tile, pl.ds(first + mine.start, ACC_ROWS)]
        products *= scales.of_columns(of_tokens, tile * TILE_TOKENS + first_token, products.shape)
        products *= scales.of_listed_rows(of_neurons, neurons, products.shape)
    sums = []
    for part in range(parts):
        a, _ = ring.in_16_bits().take(step + part)
        gates = a[mine]
        ring.release(step + part)
        value = gates.astype(jnp.float32)
        if operands.w_up is not None:
            value *= rectifier.linear(products[:, part * width : (part + 1) * width])
        sums.append(jnp.sum(jnp.abs(value), axis=1))
        arrays = [gates, value.astype(hidden.dtype)][-hidden.shape[1] // CHUNK_NEURONS :]
        columns = pl.ds(first_token + part * width, width)
        targets = [
            (hidden, (item, pl.ds(f * CHUNK_NEURONS + mine.start, ACC_ROWS), columns))
            for f in range(len(arrays))
        ]
        buffers.write(arrays, part, targets)
    l1[i, mine] = sum(sums)
    return step + parts

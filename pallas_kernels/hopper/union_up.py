"""Up projection on tile unions: `h = g * (x @ w_up[neurons]^T)` for each row tile.

For 128 neurons of a tile's union this is one dense matmul with gathered rows. The gates of these
neurons, gathered too, follow the weights through the ring, a quarter of the tokens at a time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import operands
from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.hopper.frames.gathered_matmul import CONSUMERS, ROWS, STEP
from pallas_kernels.layouts.tile_union import CHUNK, TOKENS, Plan

_PARTS = TOKENS // ROWS  # of a block, for the gate and for h


def union_up_reference(x, gate, w_up, plan, *, with_gate=False):
    """Pure-JAX meaning of `union_up`."""
    tiles, h = plan.neurons.shape
    items = plan.items[:, None]
    in_list = jnp.arange(len(items)) < plan.item_count
    tile, first = items // (h // CHUNK), items % (h // CHUNK) * CHUNK
    column = first + jnp.arange(CHUNK)
    in_union = ((column < plan.sizes[tile]) & in_list[:, None])[:, :, None]
    neurons = plan.neurons[tile, column]
    gates = jnp.where(in_union, gate[tile, neurons], 0)
    value = gates.astype(jnp.float32)
    if w_up is not None:
        x = jnp.pad(x, ((0, -x.shape[0] % TOKENS), (0, 0))).reshape(tiles, TOKENS, -1)
        up = jnp.einsum(
            "idt,ihd->iht", x[tile[:, 0]].mT, w_up[neurons], preferred_element_type=jnp.float32
        )
        value *= up
    hidden = value.astype(gate.dtype)
    if with_gate and w_up is not None:
        hidden = jnp.concatenate([gates, hidden], axis=1)
    return hidden, jnp.sum(jnp.abs(value), where=in_union)


def union_up(
    x: jax.Array, gate: jax.Array, w_up: jax.Array | None, plan: Plan, *, with_gate: bool = False
) -> tuple[jax.Array, jax.Array]:
    """Computes h, the gates times `x . w_up[n]`, for the neurons n in each tile's union.

    In the non-gated form h is the gate. Sums in float32 and rounds once.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      gate: `[R, H, 256]` as `gate_union` returns it, R = ceil(M / 256).
      w_up: `[H, D]`, H a multiple of 128 up to 65536. None for the non-gated form.
      plan: the unions.
      with_gate: return the gates, too, for gradients.

    Returns:
      h: `[items, 128, 256]`, the block of each item; zeros past the union's size, unspecified from
        `item_count` on. With gates `[items, 256, 256]`, their block above that of h, but in the
        non-gated form.
      l1: float32 scalar, the sum of |h| before rounding.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    m, h = x.shape[0], plan.neurons.shape[1]
    operands.check_weight(
        "a weight to go with x and plan", jax.ShapeDtypeStruct((h, x.shape[1]), x.dtype)
    )
    operands.check_array("w_up", w_up, (h, x.shape[1]), x.dtype)
    operands.check_array("gate", gate, (pl.cdiv(m, TOKENS), h, TOKENS), x.dtype)
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))  # for the tiling of its copies
    (items,) = plan.items.shape
    rows = 2 * CHUNK if with_gate and w_up is not None else CHUNK
    hidden, l1 = gathered_matmul.gathered_matmul(
        describe_item,
        _produce,
        _consume,
        plan.item_count,
        plan.items,
        plan.neurons,
        plan.sizes,
        x,
        w_up,
        gate,
        jobs=lambda item_count, *_: item_count[0],
        a_shape=(CONSUMERS * ROWS, STEP),
        b_shape=(TOKENS, STEP),
        out_type=(
            jax.ShapeDtypeStruct((items, rows, TOKENS), x.dtype),
            jax.ShapeDtypeStruct((items, CHUNK), jnp.float32),
        ),
        name="union_up",
    )
    is_computed = (jnp.arange(items) < plan.item_count)[:, None]
    return hidden, jnp.sum(l1, where=is_computed)


def describe_item(i, _, items, neurons, sizes, *rest):
    """Item, row tile, first neuron, and how many there are from this one on."""
    chunks = neurons.shape[1] // CHUNK
    tile, first = items[i] // chunks, items[i] % chunks * CHUNK
    return i, tile, first, sizes[tile] - first


def _produce(job, ring, step, _, items, neurons, sizes, x, w_up, gate, *out):
    _, tile, first, limit = job
    indices = gathered_matmul.load_indices(neurons.at[tile, pl.ds(first, CHUNK)])

    def put_gates(part, step):
        def fill(a, _, loaded):
            plgpu.barrier_arrive(loaded)
            gathered_matmul.gather_rows(gate.at[tile], indices, limit, part * ROWS, a)

        ring.put(step, fill)
        return step + 1

    if w_up is not None:
        step = ring.put_product(step, x, tile * TOKENS, w_up, indices, limit)
    return lax.fori_loop(0, _PARTS, put_gates, step)


def _consume(job, ring, step, warpgroup, buffers, *refs):
    item, _, _, limit = job
    _, _, _, _, x, w_up, _, hidden, l1 = refs
    mine = pl.ds(warpgroup * ROWS, ROWS)
    if w_up is not None:
        steps = x.shape[1] // STEP
        products = ring.multiply_product(step, steps, warpgroup, limit)
        step += steps
    sums, writes = [], 0
    for part in range(_PARTS):
        a, _ = ring.take(step + part)
        gates = a[mine]
        ring.release(step + part)
        value = gates.astype(jnp.float32)
        if w_up is not None:
            value *= products[:, part * ROWS : (part + 1) * ROWS]
        sums.append(jnp.sum(jnp.abs(value), axis=1))
        arrays = [gates, value.astype(hidden.dtype)][-hidden.shape[1] // CHUNK :]
        for f, array in enumerate(arrays):
            rows = pl.ds(f * CHUNK + warpgroup * ROWS, ROWS)
            target = hidden.at[item, rows, pl.ds(part * ROWS, ROWS)]
            gathered_matmul.write(array, buffers.at[writes % 2], target)
            writes += 1
    l1[item, mine] = sum(sums)
    return step + _PARTS

"""Up projection on tile unions: `h = g * (x @ w_up[neurons]^T)` for each row tile.

For 128 neurons of a tile's union this is one dense matmul with gathered rows. The gates of these
neurons, gathered too, follow the weights through the ring, a quarter of the tokens at a time.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gathered_matmul, operands
from pallas_kernels.gathered_matmul import CONSUMERS, ROWS, STEP
from pallas_kernels.tile_union import CHUNK, TOKENS, Plan

_PARTS = TOKENS // ROWS  # of a block, for the gate and for h


def union_up_reference(x, gate, w_up, plan, *, keep=0):
    """Pure-JAX meaning of `union_up`."""
    tiles, h = plan.neurons.shape
    items = plan.items[:, None]
    in_list = jnp.arange(len(items)) < plan.item_count
    tile, first = items // (h // CHUNK), items % (h // CHUNK) * CHUNK
    column = first + jnp.arange(CHUNK)
    in_union = ((column < plan.sizes[tile]) & in_list[:, None])[:, :, None]
    neurons = plan.neurons[tile, column]
    factors = [jnp.where(in_union, gate[tile, neurons], 0)]
    value = factors[0].astype(jnp.float32)
    if w_up is not None:
        x = jnp.pad(x, ((0, -x.shape[0] % TOKENS), (0, 0))).reshape(tiles, TOKENS, -1)
        up = jnp.einsum(
            "idt,ihd->iht", x[tile[:, 0]].mT, w_up[neurons], preferred_element_type=jnp.float32
        )
        value *= up
        factors.append(up.astype(x.dtype))
    h = value.astype(gate.dtype), jnp.sum(jnp.abs(value), where=in_union)
    return (*h, jnp.concatenate(factors, axis=1)[:keep]) if keep else h


def union_up(
    x: jax.Array, gate: jax.Array, w_up: jax.Array | None, plan: Plan, *, keep: int = 0
) -> tuple[jax.Array, ...]:
    """Computes h, the gates times `x . w_up[n]`, for the neurons n in each tile's union.

    In the non-gated form h is the gate. Sums in float32 and rounds once.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      gate: `[R, H, 256]` as `gate_union` returns it, R = ceil(M / 256).
      w_up: `[H, D]`, H a multiple of 128 up to 65536. None for the non-gated form.
      plan: the unions.
      keep: of how many items the factors of h are returned, for gradients; at most R * H / 128.

    Returns:
      h: `[R * H / 128, 128, 256]`, the block of each item; zeros past the union's size,
        unspecified from `item_count` on.
      l1: float32 scalar, the sum of |h| before rounding.
      factors: only if keep > 0, `[keep, 256, 256]`: the block of gates above that of `x . w_up[n]`
        (`[keep, 128, 256]`, the gates, in the non-gated form). If there are more items than that,
        the last block is unspecified.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    m, tiles, h = x.shape[0], *plan.neurons.shape
    operands.check_weight(
        "a weight to go with x and plan", jax.ShapeDtypeStruct((h, x.shape[1]), x.dtype)
    )
    operands.check_array("w_up", w_up, (h, x.shape[1]), x.dtype)
    operands.check_array("gate", gate, (pl.cdiv(m, TOKENS), h, TOKENS), x.dtype)
    items = tiles * h // CHUNK
    if not 0 <= keep <= items:
        raise ValueError(f"keep must be from 0 to {items}, the number of items, got {keep}")
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))  # for the tiling of its copies
    factors = CHUNK if w_up is None else 2 * CHUNK
    hidden, l1, *kept = gathered_matmul.gathered_matmul(
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
            jax.ShapeDtypeStruct((items, CHUNK, TOKENS), x.dtype),
            jax.ShapeDtypeStruct((items, CHUNK), jnp.float32),
            *([jax.ShapeDtypeStruct((keep, factors, TOKENS), x.dtype)] if keep else []),
        ),
        name="union_up",
    )
    is_computed = (jnp.arange(items) < plan.item_count)[:, None]
    return hidden, jnp.sum(l1, where=is_computed), *kept


def _produce(i, ring, step, _, items, neurons, sizes, x, w_up, gate, *out):
    tile, chunk = _place(items[i], gate)
    first = chunk * CHUNK
    indices = gathered_matmul.load_indices(neurons.at[tile, pl.ds(first, CHUNK)])
    limit = sizes[tile] - first

    def put_gates(part, step):
        def fill(a, _, loaded):
            plgpu.barrier_arrive(loaded)
            gathered_matmul.gather_rows(gate.at[tile], indices, limit, part * ROWS, a)

        ring.put(step, fill)
        return step + 1

    if w_up is not None:
        step = ring.put_product(step, x, tile * TOKENS, w_up, indices, limit)
    return lax.fori_loop(0, _PARTS, put_gates, step)


def _consume(i, ring, step, warpgroup, buffers, *refs):
    _, _, _, _, x, w_up, _, h, l1, *kept = refs
    mine = pl.ds(warpgroup * ROWS, ROWS)
    if w_up is not None:
        steps = x.shape[1] // STEP
        products = ring.multiply(step, steps, lambda acc, a, b: plgpu.wgmma(acc, a.at[mine], b.T))
        step += steps
    sums, writes = [], 0
    for part in range(_PARTS):
        a, _ = ring.take(step + part)
        gates = a[mine]
        ring.release(step + part)
        value = gates.astype(jnp.float32)
        factors = [gates]
        if w_up is not None:
            up = products[:, part * ROWS : (part + 1) * ROWS]
            value *= up
            factors.append(up.astype(h.dtype))
        sums.append(jnp.sum(jnp.abs(value), axis=1))
        columns = pl.ds(part * ROWS, ROWS)
        blocks = [(value.astype(h.dtype), h.at[i, mine, columns])]
        for target in kept:
            # If there are too many items, the last block is as good a place as any.
            place = jnp.minimum(i, target.shape[0] - 1)
            for f, factor in enumerate(factors):
                rows = pl.ds(f * CHUNK + warpgroup * ROWS, ROWS)
                blocks.append((factor, target.at[place, rows, columns]))
        for array, target in blocks:
            gathered_matmul.write(array, buffers.at[writes % 2], target)
            writes += 1
    l1[i, mine] = sum(sums)
    return step + _PARTS


def _place(item, gate):
    chunks = gate.shape[1] // CHUNK
    return item // chunks, item % chunks

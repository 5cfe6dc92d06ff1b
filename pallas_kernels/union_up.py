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


def union_up_reference(x, gate, w_up, plan):
    """Pure-JAX meaning of `union_up`."""
    tiles, h = plan.neurons.shape
    keep = (jnp.arange(h) < plan.sizes[:, None])[:, :, None]
    value = jnp.take_along_axis(gate, plan.neurons[:, :, None], axis=1)
    value = jnp.where(keep, value, 0).astype(jnp.float32)
    if w_up is not None:
        x = jnp.pad(x, ((0, -x.shape[0] % TOKENS), (0, 0))).reshape(tiles, TOKENS, -1)
        value *= jnp.einsum(
            "rtd,rhd->rht", x, w_up[plan.neurons], preferred_element_type=jnp.float32
        )
    return value.astype(gate.dtype), jnp.sum(jnp.abs(value), where=keep)


def union_up(
    x: jax.Array, gate: jax.Array, w_up: jax.Array | None, plan: Plan
) -> tuple[jax.Array, jax.Array]:
    """Computes h, the gates times `x . w_up[n]`, for the neurons n in each tile's union.

    In the non-gated form h is the gate. Sums in float32 and rounds once.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      gate: `[R, H, 256]` as `gate_union` returns it, R = ceil(M / 256).
      w_up: `[H, D]`, H a multiple of 128 up to 65536. None for the non-gated form.
      plan: the unions.

    Returns:
      h: `[R, H, 256]`, the union's neurons in their order in the plan; zeros from there to a
        multiple of 128, then unspecified.
      l1: float32 scalar, the sum of |h| before rounding.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    m, tiles, h = x.shape[0], *plan.neurons.shape
    operands.check_weight(
        "a weight to go with x and plan", jax.ShapeDtypeStruct((h, x.shape[1]), x.dtype)
    )
    operands.check_array("w_up", w_up, (h, x.shape[1]), x.dtype)
    operands.check_array("gate", gate, (pl.cdiv(m, TOKENS), h, TOKENS), x.dtype)
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))  # for the tiling of its copies
    hidden, l1 = gathered_matmul.gathered_matmul(
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
            jax.ShapeDtypeStruct((tiles, h, TOKENS), x.dtype),
            jax.ShapeDtypeStruct((tiles, h), jnp.float32),
        ),
        name="union_up",
    )
    is_computed = jnp.arange(h) < plan.sizes[:, None]
    return hidden, jnp.sum(l1, where=is_computed)


def _produce(i, ring, step, _, items, neurons, sizes, x, w_up, gate, *out):
    tile, chunk = _place(items[i], gate)
    first = chunk * CHUNK
    indices = gathered_matmul.load_indices(neurons.at[tile, pl.ds(first, CHUNK)])
    limit = sizes[tile] - first

    def put_weights(k, step):
        def fill(a, b, loaded):
            tokens = x.at[pl.ds(tile * TOKENS, TOKENS), pl.ds(k * STEP, STEP)]
            plgpu.copy_gmem_to_smem(tokens, b, loaded)
            gathered_matmul.gather_rows(w_up, indices, limit, k * STEP, a)

        ring.put(step, fill)
        return step + 1

    def put_gates(part, step):
        def fill(a, _, loaded):
            plgpu.barrier_arrive(loaded)
            gathered_matmul.gather_rows(gate.at[tile], indices, limit, part * ROWS, a)

        ring.put(step, fill)
        return step + 1

    if w_up is not None:
        step = lax.fori_loop(0, x.shape[1] // STEP, put_weights, step)
    return lax.fori_loop(0, _PARTS, put_gates, step)


def _consume(i, ring, step, warpgroup, buffers, _, items, neurons, sizes, x, w_up, gate, h, l1):
    tile, chunk = _place(items[i], gate)
    mine = pl.ds(warpgroup * ROWS, ROWS)
    rows = pl.ds(chunk * CHUNK + warpgroup * ROWS, ROWS)
    if w_up is not None:
        steps = x.shape[1] // STEP
        u = ring.multiply(step, steps, lambda acc, a, b: plgpu.wgmma(acc, a.at[mine], b.T))
        step += steps
    sums = []
    for part in range(_PARTS):
        a, _ = ring.take(step + part)
        value = a[mine].astype(jnp.float32)
        ring.release(step + part)
        if w_up is not None:
            value *= u[:, part * ROWS : (part + 1) * ROWS]
        sums.append(jnp.sum(jnp.abs(value), axis=1))
        target = h.at[tile, rows, pl.ds(part * ROWS, ROWS)]
        gathered_matmul.write(value.astype(h.dtype), buffers.at[part % 2], target)
    l1[tile, rows] = sum(sums)
    return step + _PARTS


def _place(item, gate):
    chunks = gate.shape[1] // CHUNK
    return item // chunks, item % chunks

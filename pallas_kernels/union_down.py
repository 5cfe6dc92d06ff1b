"""Down projection on tile unions: `h @ w_down[neurons]` for each row tile.

The product is computed transposed, columns of y along the rows of an accumulator and tokens along
its columns, as h and the gathered rows lie in memory.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import gathered_matmul, operands
from pallas_kernels.gathered_matmul import CONSUMERS, ROWS, STEP
from pallas_kernels.tile_union import TOKENS, Plan

_COLUMNS = CONSUMERS * ROWS


def union_down_reference(h, w_down, plan, m):
    """Pure-JAX meaning of `union_down`."""
    keep = (jnp.arange(h.shape[1]) < plan.sizes[:, None])[:, :, None]
    h, w = jnp.where(keep, h, 0), jnp.where(keep, w_down[plan.neurons], 0)
    y = jnp.einsum("rht,rhd->rtd", h, w, preferred_element_type=jnp.float32)
    return y.reshape(-1, w_down.shape[1])[: -(-m // 8) * 8].astype(w_down.dtype)


def union_down(h: jax.Array, w_down: jax.Array, plan: Plan, m: int) -> jax.Array:
    """Sums `h[r, j] w_down[neurons[r, j]]` over the union of each tile r, in float32.

    Args:
      h: `[R, H, 256]`, bfloat16 or float16, R = ceil(m / 256), as `union_up` returns it.
      w_down: `[H, D]` of the same dtype, H a multiple of 128 up to 65536, D a multiple of 64 from
        128 to 8192.
      plan: the unions.
      m: number of tokens.

    Returns:
      y: `[m rounded up to a multiple of 8, D]` in the dtype of h.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    operands.check_weight("w_down", w_down)
    neurons, d = w_down.shape
    operands.check_array("h", h, (pl.cdiv(m, TOKENS), neurons, TOKENS), w_down.dtype)
    return gathered_matmul.gathered_matmul(
        _produce,
        _consume,
        plan.neurons,
        plan.sizes,
        h,
        w_down,
        jobs=lambda _, sizes, *rest: jnp.int32(sizes.shape[0] * pl.cdiv(d, _COLUMNS)),
        a_shape=(STEP, _COLUMNS),
        b_shape=(STEP, TOKENS),
        out_type=jax.ShapeDtypeStruct((pl.cdiv(m, 8) * 8, d), h.dtype),  # for the copies' tiling
        name="union_down",
    )


def _produce(i, ring, step, neurons, sizes, h, w_down, y):
    tile, column = _place(i, y)
    size = sizes[tile]
    steps = pl.cdiv(size, STEP)

    def load(k):
        first = jnp.minimum(k * STEP, neurons.shape[1] - STEP)
        return gathered_matmul.load_indices(neurons.at[tile, pl.ds(first, STEP)])

    def put(k, indices):
        def fill(a, b, loaded):
            plgpu.copy_gmem_to_smem(h.at[tile, pl.ds(k * STEP, STEP)], b, loaded)
            gathered_matmul.gather_rows(w_down, indices, size - k * STEP, column, a)

        ring.put(step + k, fill)
        return load(k + 1)

    lax.fori_loop(0, steps, put, load(0))
    return step + steps


def _consume(i, ring, step, warpgroup, buffers, neurons, sizes, h, w_down, y):
    tile, column = _place(i, y)
    steps = pl.cdiv(sizes[tile], STEP)
    mine = pl.ds(warpgroup * ROWS, ROWS)
    out = ring.multiply(step, steps, lambda acc, a, b: plgpu.wgmma(acc, a.at[:, mine].T, b))
    columns = pl.ds(column + warpgroup * ROWS, ROWS)
    for part in range(TOKENS // ROWS):
        tokens = out[:, part * ROWS : (part + 1) * ROWS].astype(y.dtype)
        tokens = plgpu.layout_cast(tokens, plgpu.Layout.WGMMA_TRANSPOSED)
        target = y.at[pl.ds(tile * TOKENS + part * ROWS, ROWS), columns]
        gathered_matmul.write(tokens, buffers.at[part % 2], target, transposed=True)
    return step + steps


def _place(i, y):
    blocks = pl.cdiv(y.shape[1], _COLUMNS)
    return i // blocks, i % blocks * _COLUMNS

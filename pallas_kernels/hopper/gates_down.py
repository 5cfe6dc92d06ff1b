"""Down projection on tile unions without a gate projection: `union_down` where h is the gate.

The rows of the gate are gathered where `gate_union` left them, as those of the weight are: nobody
has to copy them into blocks first. The jobs of a tile, which all read its gates, share the sum of
|h|: each adds up some of its stages while tensor cores multiply them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper import support
from pallas_kernels.hopper.device import row_copies
from pallas_kernels.hopper.device.tiles import ACC_ROWS, CONSUMERS, STAGE_K
from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.hopper.union_down import (
    COLUMNS,
    columns_of,
    describe,
    job_count,
    put_union,
    tile_and_tokens,
    write_columns,
)
from pallas_kernels.layouts.tile_union import TILE_TOKENS, Plan


def gates_down(
    gate: jax.Array, w_down: jax.Array, plan: Plan, m: int
) -> tuple[jax.Array, jax.Array]:
    """Sums `gate[n] w_down[n]` over the neurons n in the union of each tile, in float32.

    Args:
      gate: `[R, H, 256]`, bfloat16 or float16, R = ceil(m / 256), as `gate_union` returns it and
        `union_plan` leaves it.
      w_down: `[H, D]` of the same dtype, H a multiple of 128 up to 65536, D a multiple of 64 from
        128 to 8192.
      plan: the unions.
      m: number of tokens.

    Returns:
      y: `[m rounded up to a multiple of 8, D]` in the dtype of the gate.
      l1: float32 of any shape: parts of the sum of |h|.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_down", w_down)
    (neurons, d), tiles = w_down.shape, pl.cdiv(m, TILE_TOKENS)
    support.check_array("gate", gate, (tiles, neurons, TILE_TOKENS), w_down.dtype)
    support.check_array("plan.neurons", plan.neurons, (tiles, neurons), jnp.int32)
    tokens = gathered_matmul.job_tokens(tiles)
    jobs = job_count(tokens, tiles, d)
    l1, y = gathered_matmul.gathered_matmul(
        functools.partial(describe, TILE_TOKENS // tokens),
        functools.partial(_produce, tokens),
        functools.partial(_consume, tokens),
        plan.neurons,
        plan.sizes,
        plan.firsts,
        gate,
        w_down,
        jobs=lambda *_: jnp.int32(jobs),
        a_shape=(STAGE_K, COLUMNS),
        b_shape=(STAGE_K, tokens),
        b_copies=0,
        out_type=(
            jax.ShapeDtypeStruct((jobs, COLUMNS), jnp.float32),
            jax.ShapeDtypeStruct((pl.cdiv(m, 8) * 8, d), gate.dtype),  # for the copies' tiling
        ),
        name="gates_down",
    )
    return y, l1


def _produce(tokens, job, ring, step, neurons, sizes, firsts, gate, w_down, *_):
    share, size, _, _ = job
    tile, mine = tile_and_tokens(share, tokens)

    def gather_gates(k, indices, b, _):
        row_copies.gather_rows(gate.at[tile], indices, size - k * STAGE_K, mine.start, b)

    return put_union(ring, step, neurons, tile, job, w_down, gather_gates)


def _consume(tokens, job, ring, step, warpgroup, buffers, *refs):
    *_, l1, y = refs
    share, size, _, column = job
    blocks, block = pl.cdiv(y.shape[1], COLUMNS), column // COLUMNS
    steps = pl.cdiv(size, STAGE_K)
    mine = tokens // CONSUMERS  # tokens whose gates this consumer adds up

    def add_gates(k, b, sums):
        def add():
            parts = [pl.ds(warpgroup * mine + i, ACC_ROWS) for i in range(0, mine, ACC_ROWS)]
            gates = sum(jnp.abs(b[:, part].astype(jnp.float32)) for part in parts)
            return sums + jnp.sum(gates, axis=1)

        return lax.cond(k % blocks == block, add, lambda: sums)

    none = plgpu.layout_cast(jnp.zeros((STAGE_K,), jnp.float32), plgpu.Layout.WGMMA.reduce(1))
    wgmma = columns_of(warpgroup)
    out, sums = ring.multiply_and_fold(step, steps, wgmma, add_gates, none, columns=tokens)
    l1[share * blocks + block, pl.ds(warpgroup * ACC_ROWS, ACC_ROWS)] = sums
    write_columns(out, job, warpgroup, buffers, y)
    return step + steps

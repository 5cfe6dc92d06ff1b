"""Gate matmul with a TwELL epilogue: `relu(x @ w_gate^T)` leaves the registers packed.

The dense gate never reaches memory. A producer warpgroup streams tiles of `x` and `w_gate` through
a ring of shared-memory stages by TMA; two consumer warpgroups, one above the other along M,
multiply them with WGMMA, pack their 64 x 256 accumulators lane by lane (`lanes.pack_relu`) and send
them out by TMA. A stage passes from the producer to the first consumer, from it to the second and
back: the second stays a step behind, so that it still multiplies when the first begins to pack. The
ring runs on across output blocks, so that the next operands are there when a consumer has packed.
"""

import dataclasses
import functools
import math

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import lanes, operands, twell

_CONSUMERS = 2
_ROWS = 64  # of a consumer's accumulator
_BLOCK_M = _CONSUMERS * _ROWS
_STEP = 64  # columns of x and w_gate in a stage: one 128-byte swizzle
_WORDS = twell.TILE // twell.COMPRESSION


@dataclasses.dataclass(frozen=True)
class GatePackConfig:
    """Schedule of `gate_pack` on Hopper.

    Attributes:
      stages: stages of the ring in shared memory, 3 or 4, of 48 KiB each. With two, a consumer that
        waits for the next step would hold the stage that this step needs.
      grid_tile_width: column tiles that are swept together along M, for reuse in L2.
    """

    stages: int = 4
    grid_tile_width: int = 8

    def __post_init__(self):
        if self.stages not in (3, 4):
            raise ValueError(f"stages must be 3 or 4, got {self.stages}")


_TUNED = {  # (D, H) of common shapes where another schedule was faster: benchmarks/tune.py
    (512, 1408): GatePackConfig(grid_tile_width=4),
}


def gate_pack_reference(x: jax.Array, w_gate: jax.Array) -> jax.Array:
    """Pure-JAX meaning of `gate_pack`: the dense gate, then `twell.pack_reference`."""
    g = jnp.einsum("md,hd->mh", x, w_gate, preferred_element_type=jnp.float32)
    return twell.pack_reference(jnp.maximum(g, 0).astype(x.dtype))


def gate_pack(
    x: jax.Array, w_gate: jax.Array, *, config: GatePackConfig | None = None
) -> jax.Array:
    """Computes `g = relu(x @ w_gate^T)` in TwELL (arXiv 2603.23198); `twell` defines the format.

    Sums in float32, rounds to the dtype of the inputs and propagates NaN. The order of the entries
    of a tile and the words past a row's count are unspecified.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_gate: `[H, D]` of the same dtype, H a multiple of 128 up to 65536.
      config: schedule; None for the one that suits D and H.

    Returns:
      uint32 `[M, ceil(H / 256), 32]`. Rows for which `twell.overflowed` holds have true counts but
      not all of their entries.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    operands.check_weight("w_gate", w_gate)
    h, d = w_gate.shape
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"x must be [M, D] with at least one row, got {list(x.shape)}")
    m = x.shape[0]
    operands.check_array("x", x, (m, d), w_gate.dtype)
    tiles = pl.cdiv(h, twell.TILE)
    x = jnp.pad(x, ((0, -m % 8), (0, 0)))  # the tiling below moves x in groups of 8 rows
    operand = (plgpu.TilingTransform((8, _STEP)), plgpu.SwizzleTransform(128))
    config = config or _TUNED.get((d, h), GatePackConfig())
    stages = min(config.stages, d // _STEP)
    blocks = (pl.cdiv(m, _BLOCK_M), tiles)
    kernel = plgpu.kernel(
        functools.partial(_kernel, blocks=blocks, config=config),
        out_type=jax.ShapeDtypeStruct((m, tiles * _WORDS), jnp.uint32),
        scratch_types=dict(
            x_smem=plgpu.SMEM((stages, _BLOCK_M, _STEP), x.dtype, transforms=operand),
            w_smem=plgpu.SMEM((stages, twell.TILE, _STEP), x.dtype, transforms=operand),
            packed_smem=plgpu.SMEM(
                (_CONSUMERS, _ROWS, _WORDS), jnp.uint32, transforms=lanes.PACKED_TRANSFORMS
            ),
            loaded=plgpu.Barrier(num_arrivals=2, num_barriers=stages),  # one arrival per operand
            handed=plgpu.Barrier(num_barriers=stages),
            free=plgpu.Barrier(num_barriers=stages),
        ),
        grid=(min(sm_count(), math.prod(blocks)),),
        grid_names=("sm",),
        num_threads=_CONSUMERS + 1,
        thread_name="warpgroup",
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane),
    )
    return kernel(x, w_gate).reshape(m, tiles, _WORDS)


def _kernel(
    x_gmem,
    w_gmem,
    packed_gmem,
    *,
    x_smem,
    w_smem,
    packed_smem,
    loaded,
    handed,
    free,
    blocks,
    config,
):
    h, d = w_gmem.shape
    steps = d // _STEP
    stages = x_smem.shape[0]
    warpgroup = lax.axis_index("warpgroup")
    is_first = warpgroup == 0

    def stage(step):
        return lax.rem(step, jnp.int32(stages))

    def for_each_block(body):
        """Calls `body(row block, column tile, steps before)` for every block of this SM."""

        @plgpu.nd_loop((math.prod(blocks),), collective_axes="sm")
        def _(loop):
            (index,) = loop.index
            block, tile = plgpu.planar_snake(index, blocks, 1, config.grid_tile_width)
            body(block, tile, loop.local_index * steps)

    def produce():
        plgpu.set_max_registers(40, action="decrease")

        @for_each_block
        def _(block, tile, before):
            @pl.loop(0, steps)
            def _(k):
                s = stage(before + k)
                plgpu.barrier_wait(free.at[s])
                columns = pl.ds(k * _STEP, _STEP)
                plgpu.copy_gmem_to_smem(
                    x_gmem.at[pl.ds(block * _BLOCK_M, _BLOCK_M), columns],
                    x_smem.at[s],
                    loaded.at[s],
                )
                plgpu.copy_gmem_to_smem(
                    w_gmem.at[pl.ds(tile * twell.TILE, twell.TILE), columns],
                    w_smem.at[s],
                    loaded.at[s],
                )

        for s in range(stages):
            plgpu.barrier_wait(free.at[s])

    def consume():
        plgpu.set_max_registers(232, action="increase")
        my_rows = pl.ds(warpgroup * _ROWS, _ROWS)

        for s in range(stages):
            plgpu.barrier_arrive(free.at[s], predicate=~is_first)

        def pass_on(s):
            plgpu.barrier_arrive(handed.at[s], predicate=is_first)
            plgpu.barrier_arrive(free.at[s], predicate=~is_first)

        @for_each_block
        def _(block, tile, before):
            def multiply(acc, k):
                s = stage(before + k)
                lax.cond(
                    is_first,
                    lambda: plgpu.barrier_wait(loaded.at[s]),
                    lambda: plgpu.barrier_wait(handed.at[s]),
                )
                plgpu.wgmma(acc, x_smem.at[s, my_rows], w_smem.at[s].T)

            def accumulate(acc):
                multiply(acc, 0)

                @pl.loop(1, steps)
                def _(k):
                    multiply(acc, k)
                    plgpu.wgmma_wait(1)
                    pass_on(stage(before + k - 1))

                plgpu.wgmma_wait(0)
                pass_on(stage(before + steps - 1))
                return acc[...]

            acc = pl.run_scoped(accumulate, plgpu.ACC((_ROWS, twell.TILE), jnp.float32))
            if h % twell.TILE:  # columns past H are loaded as 0, but 0 * inf is NaN
                column = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=plgpu.Layout.WGMMA)
                acc = jnp.where(column < h - tile * twell.TILE, acc, 0)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            lanes.pack_relu(acc, x_gmem.dtype, tile, packed_smem.at[warpgroup])
            plgpu.commit_smem()
            plgpu.copy_smem_to_gmem(
                packed_smem.at[warpgroup],
                packed_gmem.at[
                    pl.ds(block * _BLOCK_M + warpgroup * _ROWS, _ROWS),
                    pl.ds(tile * _WORDS, _WORDS),
                ],
            )

        plgpu.wait_smem_to_gmem(0)

    lax.cond(warpgroup == _CONSUMERS, produce, consume)


def sm_count() -> int:
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.num_cores if device else jax.local_devices()[0].core_count

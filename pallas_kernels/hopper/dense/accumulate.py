"""Sums of products over a pipeline that copies operands by TMA: the frame of `dense_rows`."""

import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import engine
from pallas_kernels.hopper.common.tiles import CONSUMERS, tiled


def operand(block, index_map, dtype=jnp.bfloat16):
    """An operand of `accumulate`, of which a stage holds `block`."""
    return plgpu.BlockSpec(block, index_map, transforms=tiled(dtype, block[1]), delay_release=1)


def accumulate(factors, finish, columns, stages, slots, in_specs, scratch):
    """A pipeline of `stages`, for which shared memory has `slots`.

    Of a stage, `factors(*smem)` are those of the sums, `[64, c]` for each c of `columns`.
    `finish` gets the sums. `scratch` is SMEM of the warpgroup, as of `Engine.sum_products`.
    """
    multiplier = engine.current()

    def multiply(_, *smem_and_sums):
        *smem, sums = smem_and_sums
        return multiplier.step(sums, factors(*smem))

    def unused():
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        return scratch

    return plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(stages,),
        memory_registers=40,
        in_specs=in_specs,
        wg_axis="warpgroup",
        num_compute_wgs=CONSUMERS,
        max_concurrent_steps=min(slots, stages),
        compute_context=lambda pipeline: finish(
            multiplier.sum_in_pipeline(pipeline, columns, unused)
        ),
    )

"""Sums of products over a pipeline that copies operands by TMA: the frame of `dense_rows`."""

import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS, STAGE_K, tiled


def operand(block, index_map, dtype=jnp.bfloat16):
    """An operand of `accumulate`, of which a stage holds `block`."""
    return plgpu.BlockSpec(block, index_map, transforms=tiled(dtype, STAGE_K), delay_release=1)


def accumulate(multiply, finish, columns, stages, slots, in_specs):
    """A pipeline of `stages`, for which shared memory has `slots`.

    `multiply` adds to accumulators `[64, c]`, one for each c of `columns`. `finish` gets the sums.
    """

    def compute(pipeline):
        def accumulate(*accs):
            pipeline(accs)
            return [acc[...] for acc in accs]

        finish(pl.run_scoped(accumulate, *(plgpu.ACC((ACC_ROWS, c), jnp.float32) for c in columns)))

    return plgpu.emit_pipeline_warp_specialized(
        multiply,
        grid=(stages,),
        memory_registers=40,
        in_specs=in_specs,
        wg_axis="warpgroup",
        num_compute_wgs=CONSUMERS,
        max_concurrent_steps=min(slots, stages),
        compute_context=compute,
    )

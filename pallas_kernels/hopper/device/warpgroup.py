"""The threads of a warpgroup together."""

from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu


@plgpu.inline_mgpu()
def barrier(_) -> None:
    """Waits for all warps, for instance so that shared memory can be filled again."""
    mgpu.warpgroup_barrier()

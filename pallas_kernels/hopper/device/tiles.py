"""Tile sizes, SMEM transforms and masks that the matmul kernels share."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2  # warpgroups that multiply, besides one that copies
ACC_ROWS = 64  # rows of one consumer's accumulator
STAGE_K = 64  # elements of the contracted axis in a stage: the 128 bytes of a swizzle
TILED = (plgpu.TilingTransform((8, STAGE_K)), plgpu.SwizzleTransform(128))


def are_before(end: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Whether each row of an accumulator of `shape` is before row `end`, for all its elements."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) < end

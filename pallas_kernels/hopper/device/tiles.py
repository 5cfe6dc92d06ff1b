"""Tile sizes and SMEM transforms that the matmul kernels share."""

from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2  # warpgroups that multiply, besides one that copies
ACC_ROWS = 64  # rows of one consumer's accumulator
STAGE_K = 64  # elements of the contracted axis in a stage: the 128 bytes of a swizzle
TILED = (plgpu.TilingTransform((8, STAGE_K)), plgpu.SwizzleTransform(128))

"""Sizes that the matmul frames share: what one WGMMA, one stage and one swizzle hold."""

from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2  # warpgroups that multiply, beside one that copies
ACC_ROWS = 64  # rows of the accumulator that one consumer has
STAGE_K = 64  # elements of the contracted axis in a stage: one 128-byte swizzle
TILED = (plgpu.TilingTransform((8, STAGE_K)), plgpu.SwizzleTransform(128))

"""Counts what `union_plan` decides by, for each row tile: the kernel in front of its own."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.unions import tile_counts


def tile_stats(
    masks: jax.Array, counts: jax.Array, m: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Describes row tiles as `tile_counts.describe` does.

    Args:
      masks: uint32 `[2, R, H / 32]`, R = ceil(m / 256), H a multiple of 128 up to 65536.
      counts: uint8 `[H / 64, R * 256]`.
      m: number of tokens.

    Returns:
      stats: int32 `[R, 4]`, of `tile_union.stats_of_tiles`: neurons that any token uses, neurons
        that any does that is not outlying, outlying tokens, tokens that are not finite.
      bits: uint32 `[R, 2, 8]`, bits of these tokens.
      nnz: int32 `[R * 256]`; past m, anything.
    """
    tiles = masks.shape[1]
    kernel = plgpu.kernel(
        functools.partial(_kernel, m),
        out_type=(
            jax.ShapeDtypeStruct((tiles, 4), jnp.int32),
            jax.ShapeDtypeStruct((tiles, 2, 8), jnp.uint32),
            jax.ShapeDtypeStruct((counts.shape[1],), jnp.int32),
        ),
        scratch_types=dict(scratch=plgpu.SMEM((tile_counts.SCRATCH_WORDS,), jnp.uint32)),
        grid=(tiles,),
        grid_names=("tile",),
        kernel_name="tile_stats",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(masks, counts)


def _kernel(m, masks, counts, stats, bits, nnz, *, scratch):
    tile = lax.axis_index("tile")
    tile_counts.describe(masks, counts, tile, m, stats, bits, nnz, scratch)

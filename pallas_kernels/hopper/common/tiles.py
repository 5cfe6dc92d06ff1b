"""Tile sizes, SMEM transforms and masks that the matmul kernels share."""

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

CONSUMERS = 2  # warpgroups that multiply, besides one that copies
ACC_ROWS = 64  # rows of one consumer's accumulator
_SWIZZLE = 128  # bytes of a row of a tile, at most


def _widest(dtype: jax.typing.DTypeLike) -> int:
    """Elements of a row of the widest tile."""
    return _SWIZZLE // jnp.dtype(dtype).itemsize


def tiled(dtype: jax.typing.DTypeLike, columns: int | None = None) -> tuple:
    """The transforms of operands in SMEM with so many columns, of which a tile has 128 bytes, or
    all if there are fewer."""
    columns = _widest(dtype) if columns is None else min(columns, _widest(dtype))
    swizzle = columns * jnp.dtype(dtype).itemsize
    return plgpu.TilingTransform((8, columns)), plgpu.SwizzleTransform(swizzle)


STAGE_K = _widest(jnp.bfloat16)
TILED = tiled(jnp.bfloat16)


def are_before(end: jax.Array, shape: tuple[int, int]) -> jax.Array:
    """Whether each row of an accumulator of `shape` is before row `end`, for all its elements."""
    return plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) < end

"""Products of 8-bit floats whose sums are kept in float32.

The tensor cores of Hopper keep some 14 bits of the sum of such products (DeepSeek-V3, arXiv
2412.19437, section 3.3.2). So they sum up one stage at a time, and the sums of the stages are added
in registers. An accumulator takes half of a lane's registers; partial sums therefore have half as
many columns, and while a warpgroup adds them, the tensor cores work for the other.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device.tiles import ACC_ROWS

EACH_STAGE = True  # otherwise the tensor cores sum up all stages
_HALVES = 2


def is_needed(dtype: jax.typing.DTypeLike) -> bool:
    """Whether products of this dtype are added stage by stage."""
    return EACH_STAGE and jnp.dtype(dtype).itemsize == 1


def halves(columns: int) -> list[jax.Array]:
    """Sums of no stages, in two halves side by side; `joined` makes one array of them."""
    return [zeros(columns // _HALVES) for _ in range(_HALVES)]


def zeros(columns: int) -> jax.Array:
    """Zeros in the place of an accumulator."""
    return plgpu.layout_cast(jnp.zeros((ACC_ROWS, columns), jnp.float32), plgpu.Layout.WGMMA)


def add_product(sums: list[jax.Array], a, b) -> list[jax.Array]:
    """`sums + a @ b^T` for a stage `a: [64, K]` and `b: [columns, K]` in SMEM."""
    width = b.shape[0] // _HALVES
    return [total + product(a, b.at[pl.ds(half * width, width)]) for half, total in enumerate(sums)]


def product(a, b) -> jax.Array:
    """`a @ b^T`, float32, for `a: [64, K]` and `b: [columns, K]` in SMEM."""

    def multiply(acc):
        plgpu.wgmma(acc, a, b.T)
        plgpu.wgmma_wait(0)
        return acc[...]

    return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], b.shape[0]), jnp.float32))


def joined(sums: list[jax.Array]) -> jax.Array:
    """The sums as one array."""
    return lax.concatenate(sums, 1)

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

EACH_STAGE = True  # otherwise the tensor cores sum up all stages
_HALVES = 2


def is_needed(dtype: jax.typing.DTypeLike) -> bool:
    """Whether products of this dtype are added stage by stage."""
    return EACH_STAGE and jnp.dtype(dtype).itemsize == 1


def zeros(shape: tuple[int, int]) -> list[jax.Array]:
    """Sums of no stages, in two halves side by side; `joined` makes one array of them."""
    half = jnp.zeros((shape[0], shape[1] // _HALVES), jnp.float32)
    return [plgpu.layout_cast(half, plgpu.Layout.WGMMA) for _ in range(_HALVES)]


def add_product(sums: list[jax.Array], a, b) -> list[jax.Array]:
    """`sums + a @ b^T` for a stage `a: [64, K]` and `b: [columns, K]` in SMEM."""
    width = b.shape[0] // _HALVES

    def part(half):
        def multiply(acc):
            plgpu.wgmma(acc, a, b.at[pl.ds(half * width, width)].T)
            plgpu.wgmma_wait(0)
            return acc[...]

        return pl.run_scoped(multiply, plgpu.ACC((a.shape[0], width), jnp.float32))

    return [total + part(half) for half, total in enumerate(sums)]


def joined(sums: list[jax.Array]) -> jax.Array:
    """The sums as one array."""
    return lax.concatenate(sums, 1)

"""Tokens in 8-bit floats, in one pass: each is read once, and its scale found in registers."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common.round_rows import ROWS, round_rows
from pallas_kernels.quantised import E4M3, Quantised
from pallas_kernels.weights import DTYPES


def round_tokens(x: jax.Array) -> Quantised:
    """Rounds tokens as `quantised.rounded` does, to the bit.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 8 up to 8192.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    if x.ndim != 2 or x.dtype not in DTYPES or not len(x) or x.shape[1] % 8 or x.shape[1] > 8192:
        raise ValueError(
            "x must be a bfloat16 or float16 [M, D] with at least one row and D a multiple of 8 up "
            f"to 8192, got {x.dtype} {list(x.shape)}"
        )
    m, d = x.shape
    kernel = plgpu.kernel(
        _kernel,
        out_type=(jax.ShapeDtypeStruct((m, d), E4M3), jax.ShapeDtypeStruct((m, 1), jnp.float32)),
        grid=(pl.cdiv(m, ROWS),),
        grid_names=("block",),
        kernel_name="round_tokens",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return Quantised(*kernel(x))


def _kernel(x, values, scale):
    first = lax.axis_index("block") * ROWS
    rows = pl.ds(first, ROWS)
    round_rows(x.at[rows], values.at[rows], scale.at[rows], x.shape[0] - first)

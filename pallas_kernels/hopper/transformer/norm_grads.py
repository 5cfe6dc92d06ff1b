"""The backward pass of an RMSNorm and of the residual connection around what follows it.

Bytes limit it: x and both gradients are read once, and dx is written once. XLA reads x and the
gradient of the norm twice, as a row's sums come before its first result.
"""

from functools import partial

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import params, register_rows, support

_RESIDENT = {1: 5, 2: 3}  # blocks that an SM's registers hold, by accesses to a row; else 2


def norm_grads(
    x: jax.Array, of_normed: jax.Array, of_x: jax.Array, scale: jax.Array, *, eps: float
) -> tuple[jax.Array, jax.Array]:
    """Gradients for x and for the scale of `normed = x / sqrt(mean(x^2) + eps) * scale`.

    x is used by itself, too: as the residual. All is computed in float32 and rounded once.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 8 up to 8192.
      of_normed: `[M, D]`, the gradient for `normed`, in the dtype of x.
      of_x: `[M, D]`, the gradient for the other use of x, in the dtype of x.
      scale: float32 `[D]`.
      eps: of the norm.

    Returns:
      The gradients for x, `[M, D]` in its dtype, and for the scale, float32 `[D]`, summed in an
      order that depends on the number of the device's SMs.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_tokens(x)
    m, d = x.shape
    for name, a in (("of_normed", of_normed), ("of_x", of_x)):
        support.check_array(name, a, (m, d), x.dtype)
    support.check_array("scale", scale, (d,), jnp.float32)
    resident = _RESIDENT.get(register_rows.row_steps(d), 2)
    blocks, width = min(m, resident * support.sm_count()), register_rows.row_width(d)
    kernel = plgpu.kernel(
        partial(_kernel, eps=eps),
        out_type=(
            jax.ShapeDtypeStruct((m, d), x.dtype),
            jax.ShapeDtypeStruct((blocks, width), jnp.float32),
        ),
        scratch_types=dict(sums=plgpu.SMEM((2, 2, 4), jnp.float32)),
        grid=(blocks,),
        grid_names=("block",),
        kernel_name="norm_grads",
        compiler_params=params.UNORDERED,
    )
    dx, of_scale = kernel(x, of_normed, of_x, jnp.pad(scale, (0, width - d)))
    return dx, of_scale.sum(axis=0)[:d]


def _kernel(x, of_normed, of_x, scale, dx, of_scale, *, sums, eps):
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    m, d = x.shape
    layout = register_rows.row_layout(d)
    gain = plgpu.load(scale, layout=layout)

    def fetch(i):
        row = block + i * blocks
        return [register_rows.load_row(a.at[row], row < m) for a in (x, of_normed, of_x)]

    def body(i, carry):
        total, rows = carry
        xs, normed_grads, own = map(register_rows.widen, rows)
        rows = fetch(i + 1)  # on their way while this row is summed
        scaled = normed_grads * gain
        squares, products = register_rows.sum_rows([xs * xs, scaled * xs], sums.at[i % 2])
        root = lax.rsqrt(squares * (1 / d) + eps)
        xs *= root
        result = own + root * (scaled - xs * (root * products * (1 / d)))
        register_rows.store_row(dx.at[block + i * blocks], result.astype(dx.dtype))
        return total + normed_grads * xs, rows

    zeros = plgpu.layout_cast(jnp.zeros(of_scale.shape[1], jnp.float32), layout)
    total, _ = lax.fori_loop(0, pl.cdiv(m - block, blocks), body, (zeros, fetch(0)))
    of_scale[block] = total

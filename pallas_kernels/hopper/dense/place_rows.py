"""Copies rows to places that only the GPU knows: what `dense_rows` has computed, into y."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.common import params, register_rows, scalars, support
from pallas_kernels.hopper.common.dependent_launch import await_previous
from pallas_kernels.hopper.common.support import sm_count


def place_rows(
    count: jax.Array,
    rows: jax.Array,
    y_rows: jax.Array,
    y_ref: jax.Ref,
    residual: jax.Array | None = None,
) -> None:
    """Sets `y[rows[i]]` to `y_rows[i]`, plus `residual[rows[i]]` if given, for each i < count.

    Args:
      count: int32 `[1]`.
      rows: int32, distinct indices, at least `count`.
      y_rows: 16-bit, of as many columns as y, a multiple of 8.
      y_ref: mutable `[M, D]`, in the dtype of `y_rows`.
      residual: of as many columns and the same dtype, with all rows that `rows` may name.

    Raises:
      ValueError: if `y_ref` or `residual` is not as above.
    """
    for name, a in (("y_ref", y_ref), ("residual", residual)):
        if a is not None:
            support.check_array(name, a, (a.shape[0], y_rows.shape[1]), y_rows.dtype)
    kernel = plgpu.kernel(
        _kernel,
        grid=(min(y_ref.shape[0], 4 * sm_count()),),
        grid_names=("block",),
        kernel_name="place_rows",
        compiler_params=params.UNORDERED,
    )
    kernel(*in_place.barrier((count, rows, y_rows, residual)), y_ref)


def _kernel(count, rows, y_rows, residual, y):
    block, blocks = lax.axis_index("block"), lax.axis_size("block")
    await_previous()  # launched while the second kernel of `dense_rows` runs

    @pl.loop(0, pl.cdiv(scalars.read(count) - block, blocks))
    def _(i):
        i = block + i * blocks
        row = rows[i]
        if residual is None:
            register_rows.copy_row(y_rows.at[i], y.at[row])
        else:
            both = residual.at[row], y_rows.at[i]
            parts = [register_rows.load_row(a, jnp.bool(True)) for a in both]
            total = sum(map(register_rows.widen, parts))
            register_rows.store_row(y.at[row], total.astype(y.dtype))

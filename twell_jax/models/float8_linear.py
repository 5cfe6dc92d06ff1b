"""Linear layers in training with operands of 8 bits, which a kernel rounds for both passes.

`ffn.float8` says what has which scale. Products on Hopper want operands along the sum, so tokens
and their gradients are needed by rows and by columns. XLA rotates a gradient back for its maximum,
once more to round it, and then transposes bytes. Here a bound takes the place of that maximum:
rotation lengthens no pair of features, and no feature exceeds the length of its pair. The kernel
does the rest in one pass.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.kernels import TransformerKernels
from pallas_kernels.weights import DTYPES
from twell_jax.ffn import float8
from twell_jax.models.rope import Rotation, Table
from twell_jax.models.sharding import has_shares, on_shares

_TILE = 64  # tokens and columns of which the kernel takes a multiple
_MOST = 2**32  # bytes of an operand that it addresses

# x, by columns if the kernel has rounded it, the weights, and the angles.
type _Kept = tuple[float8.Scaled, float8.Scaled, Table | None]


def serves(
    x: jax.Array, columns: list[int], rotation: Rotation | None, *, is_written: bool
) -> bool:
    """Whether `products` takes `x: [B, T, K]` and weights of so many columns."""
    if x.ndim != 3 or x.dtype not in DTYPES or not has_shares(x):
        return False
    batch, tokens, width = x.shape
    sizes = [tokens, *columns]
    if is_written:
        sizes.append(width)
    if rotation is not None and rotation.rotated:
        if rotation.size != rotation.head_dim:
            return False
        sizes.append(rotation.head_dim)
    widest = max(width, sum(columns))
    return not any(size % _TILE for size in sizes) and batch * tokens * widest < _MOST


def products(
    x: jax.Array,
    weights: list[jax.Array],
    most: float8.Most,
    rotation: Rotation | None,
    kernels: TransformerKernels,
    *,
    is_written: bool,
) -> list[jax.Array]:
    """`float8.products`, of which the first ones are rotated; see `serves`.

    Args:
      x: `[B, T, K]`, bfloat16 or float16.
      weights: each `[K, N]` in the dtype of x.
      most: float32 [] each, which no finite element of x, and no weight, exceeds.
      rotation: of which results, by which angles; or None.
      kernels: round.
      is_written: whether x lies in memory, so that a kernel may read it. Else XLA rounds it where
        it is computed.
    """
    rotated, table = (rotation.rotated, rotation.table) if rotation else (0, None)
    static = kernels, rotated, is_written
    return _products(*static, x, tuple(weights), most, table if rotated else None)


@partial(jax.custom_vjp, nondiff_argnums=(0, 1, 2))
def _products(*operands: Any) -> list[jax.Array]:
    return _with_residuals(*operands)[0]


def _with_residuals(
    kernels: TransformerKernels,
    rotated: int,
    is_written: bool,
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    most: float8.Most,
    table: Table | None,
) -> tuple[list[jax.Array], _Kept]:
    of_x, of_weights = most
    if is_written:
        scale, inverse = float8.scale_and_inverse(of_x, float8.FORWARD)
        by_rows, by_columns = _rounded(kernels, 0, [x], inverse, float8.FORWARD, None)
        rows, kept = (float8.Scaled(a, scale) for a in (by_rows, by_columns))
        kept = float8.kept(kept)
    else:
        rows = kept = float8.kept(
            float8.scaled([x.reshape(-1, x.shape[-1])], float8.FORWARD, most=of_x)
        )
    ys, matrix = float8.multiplied(rows, weights, of_weights, 0)
    ys = [y.reshape(*x.shape[:-1], -1) for y in ys]
    if table is not None:
        ys = Rotation(table, 2 * table[0].shape[-1], rotated).of(ys)
    return ys, (kept, matrix, table)


def _gradients(
    kernels: TransformerKernels,
    rotated: int,
    is_written: bool,
    residuals: _Kept,
    of_ys: list[jax.Array],
) -> tuple[jax.Array, tuple[jax.Array, ...], None, None]:
    (x, matrix, table), dtype = residuals, of_ys[0].dtype
    most = jnp.max(jnp.stack([float8.largest(of_y) for of_y in of_ys])).astype(jnp.float32)
    if table is not None:
        cos, sin = (angles[0, 0, 0, 0] for angles in table)  # all pairs have one length
        most *= 1.4143 * jnp.maximum(1, jnp.hypot(cos, sin))
    scale, inverse = float8.scale_and_inverse(most, float8.BACKWARD)
    by_rows, by_columns = _rounded(kernels, rotated, of_ys, inverse, float8.BACKWARD, table)
    grads = float8.Scaled(by_rows, scale)
    of_x = float8.dot(grads, matrix, (1, 1), dtype)
    axes = int(is_written), 1
    of_weights = float8.dot(x, float8.Scaled(by_columns, scale), axes, dtype)
    widths = [of_y.shape[-1] for of_y in of_ys]
    shape = *of_ys[0].shape[:-1], of_x.shape[-1]
    return of_x.reshape(shape), tuple(float8.split(of_weights, widths, 1)), None, None


def _rounded(
    kernels: TransformerKernels,
    rotated: int,
    arrays: list[jax.Array],
    inverse: jax.Array,
    dtype: jax.typing.DTypeLike,
    table: Table | None,
) -> tuple[jax.Array, jax.Array]:
    """Arrays `[B, T, N]` side by side in 8 bits, `[B T, all N]`, and their transpose."""
    parts = len(arrays)
    is_split = table is not None and len(table[0]) > 1  # a row of angles for each sequence

    def of_share(*operands):
        *split, (table, inverse) = operands
        rows = tuple(a.reshape(-1, a.shape[-1]) for a in split[:parts])
        table = tuple(split[parts:]) if is_split else table
        angles = table and tuple(a.reshape(-1, a.shape[-1]) for a in table)
        return kernels.round_both(rows, inverse, dtype, angles, rotated)

    split = (*arrays, *(table or ())) if is_split else arrays
    whole = (None if is_split else table), inverse
    return on_shares(of_share, *split, whole=whole, joined=(0, 1))


_products.defvjp(_with_residuals, _gradients)

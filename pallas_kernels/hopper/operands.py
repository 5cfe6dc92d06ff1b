"""What the kernels ask of their operands."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import twell


def check_weight(name: str, w: jax.Array) -> None:
    """Raises ValueError unless `w` is a neuron-major weight that the kernels take."""
    if w.ndim != 2 or w.dtype not in twell.DTYPES:
        raise ValueError(
            f"{name} must be a bfloat16 or float16 [H, D], got {w.dtype} {list(w.shape)}"
        )
    h, d = w.shape
    if h % 128 or not 0 < h <= twell.MAX_COLUMNS or d % 64 or not 128 <= d <= 8192:
        raise ValueError(
            f"{name} must be [H, D] with H a multiple of 128 up to {twell.MAX_COLUMNS} and D a "
            f"multiple of 64 from 128 to 8192, got {list(w.shape)}"
        )


def check_tokens(x: jax.Array, w_gate: jax.Array) -> None:
    """Raises ValueError unless the kernels take these two operands of a gate matmul."""
    check_weight("w_gate", w_gate)
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"x must be [M, D] with at least one row, got {list(x.shape)}")
    check_array("x", x, (x.shape[0], w_gate.shape[1]), w_gate.dtype)


def check_array(
    name: str, array: jax.Array | None, shape: tuple[int, ...], dtype: jax.typing.DTypeLike
) -> None:
    """Raises ValueError unless `array` is None or has this shape and dtype."""
    dtype = jnp.dtype(dtype)
    if array is not None and (array.shape != shape or array.dtype != dtype):
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} to go with the other operands, got "
            f"{array.dtype} {list(array.shape)}"
        )

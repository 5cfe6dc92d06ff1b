"""What the Hopper kernels can serve: devices, shapes and dtypes."""

import os
import re

import jax
import jax.numpy as jnp
from jax.sharding import AbstractDevice

from pallas_kernels.device import current
from pallas_kernels.hopper.common.primitives import interpretation
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import E4M3, Operand, Quantised
from pallas_kernels.weights import DTYPES

# What is in names of devices, by their compute capability; H20: H200, too. An "RTX 5000 Ada" is
# older than its number.
_NAMES = {
    (8, 0): r"\bA(?:100|800|30)X?\b",
    (8, 6): r"\bA(?:2|10G?|16|40)\b|RTX A\d|RTX 30[5-9]0",
    (8, 9): r"\bL(?:2|4|20|40S?)\b|RTX 40[5-9]0|RTX \d{4} (?:\w+ )?Ada",
    (9, 0): r"H100|H20|H800",
    (12, 0): r"RTX PRO|RTX 50[5-9]0|\bGB10\b",
}
_HAS_8_BITS = 8, 9  # and all later ones

# With these XLA may run two kernels of a program at the same time. They could share a counter: see
# `gathered_matmul`.
_CONCURRENT = (
    "--xla_gpu_command_buffer_scheduling_mode=concurrent",
    "--xla_gpu_graph_enable_concurrent_region=true",
    "--xla_gpu_graph_enable_concurrent_region",
)


def unsupported(w: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why Hopper's kernels cannot serve a block on this device; None if they can.

    Args:
      w: `[H, D]`, any of the block's weights.
    """
    return unsupported_by((9,), "a Hopper GPU", w)


def unsupported_by(
    majors: tuple[int, ...], needed: str, w: jax.Array | jax.ShapeDtypeStruct
) -> str | None:
    """Why kernels for devices of these compute capabilities, `needed` in words, cannot serve."""
    kind, capability = _device()
    if capability is None or capability[0] not in majors:  # other weights would not help
        return f"it needs {needed}, got {kind}"
    try:
        check_weight("w_down", w)
    except ValueError as error:
        return str(error)
    for flag in os.environ.get("XLA_FLAGS", "").split():
        if flag.lower() in _CONCURRENT:
            return f"its kernels must run one after the other: take {flag} out of XLA_FLAGS"
    return None


def no_8_bits() -> str | None:
    """Why kernels multiply no 8-bit floats on this device, which they serve; None if they do."""
    kind, capability = _device()
    if capability is not None and capability < _HAS_8_BITS:
        return f"{kind} does not multiply 8-bit floats"
    return None


def sm_count() -> int:
    """Number of streaming multiprocessors of the device that is run on, or lowered for."""
    if (interpreted := interpretation()) is not None:
        return interpreted.sms
    device = jax.sharding.get_abstract_mesh().abstract_device
    return device.num_cores if device else jax.local_devices()[0].core_count


def check_weight(name: str, w: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises ValueError unless `w` is a weight `[H, D]` that the kernels take."""
    if w.ndim != 2 or w.dtype not in DTYPES:
        raise ValueError(
            f"{name} must be a bfloat16 or float16 [H, D], got {w.dtype} {list(w.shape)}"
        )
    h, d = w.shape
    if h % 128 or not 0 < h <= twell.MAX_COLUMNS or d % 64 or not 128 <= d <= 8192:
        raise ValueError(
            f"{name} must be [H, D] with H a multiple of 128 up to {twell.MAX_COLUMNS} and D a "
            f"multiple of 64 from 128 to 8192, got {list(w.shape)}"
        )


def check_quantised(name: str, w: Quantised, shape: tuple[int, ...]) -> None:
    """Raises ValueError unless `w` has this shape, `[rows, D]`, and the kernels take it."""
    check_array(f"{name}.values", w.values, shape, E4M3)
    check_array(f"{name}.scale", w.scale, (shape[0], 1), jnp.float32)
    if shape[1] % 128:
        raise ValueError(f"{name} must have D a multiple of 128, got {list(shape)}")


def check_gate_matmul(x: Operand, w_gate: Operand, dtype: jax.typing.DTypeLike | None) -> jnp.dtype:
    """The dtype of a gate: the one given, or that of x.

    Raises:
      ValueError: kernels do not take these two operands of its matmul, or it has no 16-bit dtype.
    """
    if x.ndim != 2 or x.shape[0] < 1:
        raise ValueError(f"x must be [M, D] with at least one row, got {list(x.shape)}")
    if isinstance(w_gate, Quantised):
        check_weight("w_gate", jax.ShapeDtypeStruct(w_gate.shape, jnp.bfloat16))
        check_quantised("w_gate", w_gate, w_gate.shape)
    else:
        check_weight("w_gate", w_gate)
    check_operand("x", x, (x.shape[0], w_gate.shape[1]), w_gate)
    dtype = jnp.dtype(x.dtype if dtype is None else dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype, that of the gate, must be bfloat16 or float16, got {dtype}")
    return dtype


def check_operand(name: str, x: Operand, shape: tuple[int, ...], w: Operand) -> None:
    """Raises ValueError unless `x` has this shape, and what `w` needs for a product."""
    if isinstance(x, Quantised) != isinstance(w, Quantised):
        raise ValueError(f"{name} and the weight must both be Quantised, or neither")
    if isinstance(x, Quantised):
        check_quantised(name, x, shape)
    else:
        check_array(name, x, shape, w.dtype)


def check_array(
    name: str,
    array: jax.Array | jax.Ref | None,
    shape: tuple[int, ...],
    dtype: jax.typing.DTypeLike,
) -> None:
    """Raises ValueError unless `array` is None or has this shape and dtype."""
    dtype = jnp.dtype(dtype)
    if array is not None and (array.shape != shape or array.dtype != dtype):
        raise ValueError(
            f"{name} must be {dtype} {list(shape)} to go with the other operands, got "
            f"{array.dtype} {list(array.shape)}"
        )


def check_tokens(x: jax.Array) -> None:
    """Raises ValueError unless x is `[M, D]` as kernels take it that have a token in registers."""
    if x.ndim != 2 or x.dtype not in DTYPES or not len(x) or x.shape[1] % 8 or x.shape[1] > 8192:
        raise ValueError(
            "x must be a bfloat16 or float16 [M, D] with at least one row and D a multiple of 8 up "
            f"to 8192, got {x.dtype} {list(x.shape)}"
        )


def _device() -> tuple[str, tuple[int, ...] | None]:
    """The name of the device that is run on, or lowered for, and its compute capability; None if it
    is no GPU of NVIDIA or, of one that is not there, not known."""
    device = current()
    kind = device.device_kind
    if isinstance(device, AbstractDevice):
        return kind, next((of for of, names in _NAMES.items() if re.search(names, kind)), None)
    numbers = getattr(device, "compute_capability", "").split(".")  # of AMD: "gfx942"
    return kind, tuple(map(int, numbers)) if numbers[0].isdigit() else None

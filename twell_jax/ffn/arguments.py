"""Checks of what callers pass to `sparse_ffn` and `SparseMLP`, and what became of old names."""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.quantised import E4M3, Quantised
from twell_jax.ffn import activations
from twell_jax.ffn.algorithms import Gradients, Implementation, Packing
from twell_jax.ffn.lasso import Windows
from twell_jax.ffn.numeric import are_int32, is_integer, is_number

MatmulDtype = Literal["float8"]

_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def _threshold(given: Mapping[str, Any]) -> str:
    value, activation = given["threshold"], given.get("activation", "fatrelu")
    if activation != "fatrelu":
        return f"says nothing of activation={activation!r}: leave it out"
    if "activation" not in given and is_number(value) and value == 0:
        return "is gone where it is 0: leave it out"
    if not (is_number(value) and value > 0):
        return f"is now part of activation, and must be a number above 0, got {value!r}"
    return f"is now part of activation: write activation=Rectifier(threshold={value!r})"


def _gradient_capacity(given: Mapping[str, Any]) -> str:
    value, gradients = given["gradient_capacity"], given.get("gradients")
    if value is None:
        return "is gone where it is None: leave it out"
    if gradients is not None and gradients != "sparse":
        return f"says nothing of gradients={gradients!r}: leave it out"
    if not (is_number(value) and 0 < value <= 1):
        return f"is now part of gradients, as a number above 0 and at most 1, got {value!r}"
    if gradients is None:  # those of a module may be sparse
        return f"is gone where gradients are not sparse: leave it out, else write gradients={value}"
    return f"is now part of gradients: write gradients={value} in place of 'sparse'"


# What became of arguments of before; each gets all keyword arguments that were given.
_OLD_NAMES: dict[str, Callable[[Mapping[str, Any]], str]] = {
    "threshold": _threshold,
    "gradient_capacity": _gradient_capacity,
    "expected_nnz": lambda _: "is gone, as no rule needs it: leave it out",
    "b_gate": lambda _: "is now part of biases: write biases=Biases(gate=...)",
    "b_up": lambda _: "is now part of biases: write biases=Biases(up=...)",
    "b_down": lambda _: "is now part of biases: write biases=Biases(down=...)",
}
ALL_OLD_NAMES = tuple(_OLD_NAMES)


def refuses_old_names[**P, R](*names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """For a function that had these arguments: they raise TypeError, in a line that says the new
    ones."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if given := [name for name in names if name in kwargs]:
                raise TypeError("; ".join(f"{n} {_OLD_NAMES[n](kwargs)}" for n in given))
            return function(*args, **kwargs)

        return call

    return decorate


def check_words(implementation: Any, packing: Any, named_by: str = "implementation") -> None:
    """Raises ValueError if one of the words is unknown; `named_by` named the implementation."""
    for argument, value, choices in (
        (named_by, implementation, Implementation),
        ("packing", packing, Packing),
    ):
        if value is not None and value not in get_args(choices):
            names = ", ".join(map(repr, get_args(choices)))
            raise ValueError(f"{argument} must be {names} or None, got {value!r}")


def check_gradients(gradients: Any) -> None:
    """Raises ValueError if gradients are neither named nor a capacity."""
    if is_number(gradients):
        is_known = 0 < float(gradients) <= 1
    else:
        is_name = isinstance(gradients, str) and gradients in get_args(Gradients)
        is_known = gradients is None or is_name
    if not is_known:
        raise ValueError(
            "gradients must be 'dense', 'sparse', a capacity above 0 and at most 1, or None, got "
            f"{gradients!r}"
        )


def check_activation(activation: Any, gated: bool) -> None:
    """Raises ValueError if there is no block with this activation."""
    if problem := activations.problem(activation, gated):
        raise ValueError(f"activation {problem}")


def check_live(live: Any, h: int) -> None:
    """Raises ValueError if `live` is no number of live neurons among H; one on the device is not
    read."""
    if live is not None:
        _check_index("live", live, h)


def _check_index(name: str, index: Any, last: int) -> None:
    """Raises ValueError unless it is one integer from 0 to the last; on the device, of int32."""
    number = index if hasattr(index, "shape") else np.asarray(index)
    if number.shape or not np.issubdtype(number.dtype, np.integer):
        raise ValueError(f"{name} must be one integer, got {number.dtype} {list(number.shape)}")
    if not isinstance(index, jax.Array | jax.ShapeDtypeStruct) and not 0 <= number <= last:
        raise ValueError(f"{name} must be from 0 to {last}, got {index}")
    if not are_int32(index):
        raise ValueError(f"{name} on the device must be int32, got {number.dtype}")


def check_windows(windows: Any, x: Any) -> None:
    """Raises ValueError unless windows can be those of the tokens x."""
    if windows is None:
        return
    if not isinstance(windows, Windows):
        raise ValueError(f"windows must be Windows or None, got {type(windows).__name__}")
    if x.ndim < 2:
        raise ValueError(f"windows need x [..., T, D], whose T tokens follow, got {list(x.shape)}")
    length, documents = windows.length, windows.documents
    if not is_integer(length) or not are_int32(length) or length < 1:
        raise ValueError(f"windows.length must be an integer from 1 to 2^31 - 1, got {length!r}")
    _check_index("windows.offset", windows.offset, length - 1)
    if documents is None:
        return
    if not are_int32(documents):
        kind = getattr(documents, "dtype", type(documents).__name__)
        raise ValueError(f"windows.documents must be integers that int32 holds, got {kind}")
    if np.shape(documents) not in (x.shape[:-1], x.shape[-2:-1]):
        raise ValueError(
            f"windows.documents must be {list(x.shape[:-1])}, a number for each token, got "
            f"{list(np.shape(documents))}"
        )


def check_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError unless the block can be computed in `dtype`; `name` is what has it."""
    try:
        is_known = jnp.dtype(dtype) in _DTYPES
    except TypeError:
        is_known = False
    if not is_known:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        raise ValueError(f"{name} must be one of {names}, got {dtype}")


def check_matmul_dtype(matmul_dtype: Any, x: Any, weights: Any) -> None:
    """Raises ValueError unless operands can be rounded to this dtype.

    Args: as of `sparse_ffn`, the weights as `Weights`.
    """
    if matmul_dtype is None:
        return
    if matmul_dtype not in get_args(MatmulDtype):
        raise ValueError(f"matmul_dtype must be 'float8' or None, got {matmul_dtype!r}")
    if x.dtype == jnp.float16:
        raise ValueError(
            "matmul_dtype='float8' needs x in bfloat16 or float32, as float16 holds no scale "
            "below 2^-24; leave it out"
        )
    if any(isinstance(w, Quantised) for w in (*weights.inner, weights.down)):
        raise ValueError(
            "matmul_dtype='float8' rounds weights itself, but some are Quantised; leave it out"
        )


def check_operands(x: Any, weights: Any, biases: Any, residual: Any) -> None:
    """Raises ValueError if shapes or dtypes do not agree, or an operand is missing.

    Args: as of `sparse_ffn`, the weights as `Weights`.
    """
    for name, operand in (("x", x), ("w_up", weights.up), ("w_down", weights.down)):
        if operand is None:
            raise ValueError(f"{name} is required, got None")
    check_dtype("x", x.dtype)
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"x must be [..., D] with at least one token, got {list(x.shape)}")
    if weights.gate is None and biases.gate is not None:
        raise ValueError("biases.gate was given, but the block has no w_gate")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual must be as x, {x.dtype} {list(x.shape)}, got {residual.dtype} "
            f"{list(residual.shape)}; leave it out and add y to it"
        )
    d, w_down = x.shape[-1], weights.down
    shapes = [w.shape for w in (weights.gate, weights.up, w_down) if w is not None]
    if len(set(shapes)) == 1 and w_down.ndim == 2 and w_down.shape[1] != d:
        raise ValueError(
            f"x must be [..., {w_down.shape[1]}] (weights are [H, D], neuron-major, here "
            f"{list(w_down.shape)}), got {list(x.shape)}"
        )
    if w_down.ndim != 2 or w_down.shape[1] != d:
        raise ValueError(
            f"w_down must be [H, {d}] (neuron-major: D={d} by x), got {list(w_down.shape)}"
        )
    h = w_down.shape[0]
    for name, array, shape in (
        ("w_gate", weights.gate, (h, d)),
        ("w_up", weights.up, (h, d)),
        ("w_down", weights.down, (h, d)),
        ("biases.gate", biases.gate, (h,)),
        ("biases.up", biases.up, (h,)),
        ("biases.down", biases.down, (d,)),
    ):
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(
                f"{name} must be {list(shape)} (neuron-major: H={h} by w_down, D={d} by x), "
                f"got {list(array.shape)}"
            )
        if isinstance(array, Quantised):
            _check_quantised(name, array)
        elif array.dtype != x.dtype:
            raise ValueError(f"{name} must have the dtype of x, {x.dtype}, got {array.dtype}")


def _check_quantised(name: str, w: Quantised) -> None:
    scales = (1, w.shape[1]) if name == "w_down" else (w.shape[0], 1)
    if w.dtype != E4M3 or w.scale.shape != scales or w.scale.dtype != jnp.float32:
        axis = ", axis=-2" if name == "w_down" else ""
        raise ValueError(
            f"{name} must have float8_e4m3fn values and float32 scales {list(scales)}, as "
            f"quantise({name}{axis}) makes them, got {w.dtype}, and {w.scale.dtype} "
            f"{list(w.scale.shape)}"
        )

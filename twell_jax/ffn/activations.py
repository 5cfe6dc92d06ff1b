"""The activation functions of the feed-forward block."""

import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

Activation = Literal["relu", "relu2", "fatrelu", "drelu", "silu"]


def _fatrelu(z: jax.Array, threshold: float) -> jax.Array:
    # In float32, so that the threshold is not rounded; as a NaN is below nothing, it stays. Without
    # a barrier XLA may compare a product before it rounds it.
    return jnp.where(lax.optimization_barrier(z).astype(jnp.float32) <= threshold, 0, z)


# Each is a function of the pre-activation and the threshold, which fatrelu alone has.
FUNCTIONS: dict[Activation, Callable[[jax.Array, float], jax.Array]] = {
    "relu": lambda z, _: jax.nn.relu(z),
    "relu2": lambda z, _: jnp.square(jax.nn.relu(z)),  # Primer, arXiv 2109.08668
    "fatrelu": _fatrelu,  # z where it is above the threshold, else 0; ProSparse, arXiv 2402.13516
    "drelu": lambda z, _: jax.nn.relu(z),  # of both factors; TurboSparse, arXiv 2406.05955
    "silu": lambda z, _: jax.nn.silu(z),
}


def hidden(
    activation: Activation, threshold: float, gate: jax.Array | None, up: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The hidden activation of a block, and what its statistics count.

    Args:
      activation: a key of `FUNCTIONS`.
      threshold: of fatrelu, for the others 0.
      gate: `[..., H]`, the product with `w_gate`; None if there is none.
      up: `[..., H]`, the product with `w_up`.

    Returns:
      h `[..., H]`, and the output of the activation function `[..., H]`: of the gate, if there is
      one. Its zeros are what kernels skip.
    """
    function = FUNCTIONS[activation]
    active = function(up if gate is None else gate, threshold)
    if gate is None:
        return active, active
    return active * (function(up, threshold) if activation == "drelu" else up), active


def problem(activation: Any, threshold: Any, gated: bool) -> str | None:
    """Why there is no block with this activation, in words; None if there is one."""
    if activation not in FUNCTIONS:
        return f"must be one of {list(FUNCTIONS)}, got {activation!r}"
    is_number = isinstance(threshold, int | float) and math.isfinite(threshold)
    if activation == "fatrelu" and not (is_number and threshold > 0):
        return f"'fatrelu' needs a threshold above 0, such as 0.01, got {threshold!r}"
    if activation != "fatrelu" and threshold != 0:
        return f"{activation!r} has no threshold, which must then be 0, got {threshold!r}"
    if activation == "drelu" and not gated:
        return "'drelu' needs a gate, as it is the ReLU of both factors; without one write 'relu'"
    return None

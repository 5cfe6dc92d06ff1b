"""The activation functions of the feed-forward block."""

from dataclasses import replace
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import rectifiers
from pallas_kernels.rectifiers import Rectifier
from twell_jax.ffn.numeric import is_number

Name = Literal["relu", "relu2", "drelu", "silu"]
Activation = Name | Rectifier


def rectifier(activation: Activation) -> Rectifier | None:
    """The rectifier that is meant; None for "silu", which is none."""
    if isinstance(activation, Rectifier):
        return replace(activation, threshold=float(activation.threshold))
    return rectifiers.rectifier(activation, 0.0)


def hidden(
    activation: Activation, gate: jax.Array | None, up: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The hidden activation of a block, and what its statistics count.

    Args:
      activation: a name or a rectifier.
      gate: `[..., H]`, the product with `w_gate`; None if there is none.
      up: `[..., H]`, the product with `w_up`.

    Returns:
      h `[..., H]`, and the output of the activation function `[..., H]`: of the gate, if there is
      one. Its zeros are what kernels skip.
    """
    act, activated = rectifier(activation), up if gate is None else gate
    active = jax.nn.silu(activated) if act is None else _rectified(act, activated)
    if gate is None:
        return active, active
    return active * (jax.nn.relu(up) if act is not None and act.both else up), active


def _rectified(act: Rectifier, z: jax.Array) -> jax.Array:
    if act.threshold:
        # In float32, so that the threshold is not rounded; as a NaN is below nothing, it stays.
        # Without a barrier XLA may compare a product before it rounds it.
        is_zero = lax.optimization_barrier(z).astype(jnp.float32) <= act.threshold
        z = jnp.where(is_zero, 0, z)
    else:
        z = jax.nn.relu(z)
    return jnp.square(z) if act.squared else z


def problem(activation: Any, gated: bool) -> str | None:
    """Why there is no block with this activation, in words; None if there is one."""
    if isinstance(activation, Rectifier):
        threshold = activation.threshold
        if not is_number(threshold) or threshold < 0:
            return f"Rectifier needs a threshold of 0 or more, such as 0.01, got {threshold!r}"
    elif activation == "fatrelu":
        return "'fatrelu' has a threshold: write activation=Rectifier(threshold=0.01)"
    elif activation not in get_args(Name):
        return f"must be one of {[*get_args(Name)]} or a Rectifier, got {activation!r}"
    act = rectifier(activation)
    if act is not None and act.both and not gated:
        return (
            "'drelu' (Rectifier(both=True)) needs a gate, as it is the ReLU of both factors; "
            "without one write 'relu'"
        )
    return None

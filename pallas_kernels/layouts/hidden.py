"""The gradients for the factors of the hidden activation, as every back end computes them."""

import jax
import jax.numpy as jnp

_TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest divisor of h


def chain_rule(
    dh: jax.Array, gate: jax.Array | None, h: jax.Array, l1_grad: jax.Array
) -> list[jax.Array]:
    """The gradients for the factors of h, from that for h; float32 arrays of one shape.

    Where g is not 0, u is taken as h / g. This costs no accuracy: h was rounded once, as a stored u
    would have been. (But in float16, h becomes subnormal sooner.)

    Args:
      dh: the gradient for h, without the part from the L1 term.
      gate: g, or None in the non-gated form.
      h: g u, or relu(u) in the non-gated form.
      l1_grad: scalar, the gradient for sum |h|.

    Returns:
      [dg, du], or [du] in the non-gated form.
    """
    dh += jnp.where(h > 0, l1_grad, jnp.where(h < 0, -l1_grad, 0.0))
    if gate is None:
        return [jnp.where(h != 0, dh, 0.0)]
    up = h / jnp.maximum(gate, _TINY)  # 0 where the gate is 0, as h is 0 there
    return [dh * up, dh * gate]

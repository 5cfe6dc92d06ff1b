"""The gradient of the hidden activation's factors, as every back end computes it."""

import jax
import jax.numpy as jnp

_TINY = float(jnp.finfo(jnp.float32).tiny)  # the least that h is divided by


def chain_rule(
    dh: jax.Array, gate: jax.Array | None, h: jax.Array, l1_grad: jax.Array
) -> list[jax.Array]:
    """The gradients for the factors of h, from the gradient for h; arrays of one shape, float32.

    That u is h / g, where g is not 0, costs no accuracy: h was rounded once, as u would have been.
    (But in float16 h is subnormal sooner.)

    Args:
      dh: the gradient for h without that of the L1 term.
      gate: g, or None in the non-gated form.
      h: g u, or relu(u) in the non-gated form.
      l1_grad: scalar, the gradient for sum |h|.

    Returns:
      [dg, du], or [du] in the non-gated form.
    """
    dh += jnp.where(h > 0, l1_grad, jnp.where(h < 0, -l1_grad, 0.0))
    if gate is None:
        return [jnp.where(h != 0, dh, 0.0)]
    up = h / jnp.maximum(gate, _TINY)  # 0 where the gate is 0: there h is
    return [dh * up, dh * gate]

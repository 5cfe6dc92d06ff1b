"""Rectifiers, the activations that are mostly zero: what kernels and their twins compute of them.

A block makes its hidden activation h of the products z = x w_activated^T and u = x w_linear^T:

    g = act(z)    h = g u    dz = dh u act'(z)    du = dh g        (gated)
    h = g = act(z)           dz = dh act'(z)                       (non-gated)

The gate kernels store g, rounded. All else follows from g and h, so that a backward needs no z.
"""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

_TINY = float(jnp.finfo(jnp.float32).tiny)  # the smallest divisor of h


@dataclass(frozen=True)
class Rectifier:
    """A row of the table: g is z above the threshold, else 0. NaN stays NaN.

    Attributes:
      threshold: 0 or more; z is compared with it when it is rounded.
      squared: whether g is the square of this.
      both: whether the ReLU of u takes the place of u.
    """

    threshold: float = 0.0
    squared: bool = False
    both: bool = False

    def is_active(self, z: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """Whether the float32 `z`, rounded to `dtype`, is above the threshold or NaN."""
        if self.threshold:
            z = z.astype(dtype).astype(jnp.float32)
        return ~(z <= self.threshold)

    def power(self, z: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """g for float32 `z` that are 0 unless active; the caller rounds it to `dtype`."""
        if not self.squared:
            return z
        z = z.astype(dtype).astype(jnp.float32)
        return z * z

    def gate(self, z: jax.Array, dtype: jax.typing.DTypeLike) -> jax.Array:
        """g for any float32 `z`; the caller rounds it to `dtype`."""
        z = jnp.where(self.is_active(z, dtype), z, 0.0) if self.threshold else jnp.maximum(z, 0.0)
        return self.power(z, dtype)

    def linear(self, u: jax.Array) -> jax.Array:
        """What g is multiplied with."""
        return jnp.maximum(u, 0.0) if self.both else u

    def gradients(
        self, dh: jax.Array, gate: jax.Array | None, h: jax.Array, l1_grad: jax.Array
    ) -> list[jax.Array]:
        """The gradients for the products; float32 arrays of one shape.

        Where g is not 0, u is taken as h / g. This costs no accuracy: h was rounded once, as a
        stored u would have been. (But in float16, h becomes subnormal sooner.) The slope of a
        square is taken from its root, whose relative error is half of its own.

        Args:
          dh: the gradient for h, without the part from the L1 term.
          gate: g, or None in the non-gated form.
          h: the hidden activation.
          l1_grad: scalar, the gradient for sum |h|.

        Returns:
          [dz, du], or [dz] in the non-gated form.
        """
        dh += jnp.where(h > 0, l1_grad, jnp.where(h < 0, -l1_grad, 0.0))
        if gate is None:
            return [jnp.where(h != 0, self._times_slope(dh, h), 0.0)]
        up = h / jnp.maximum(gate, _TINY)  # 0 where the gate is 0, as h is 0 there
        dz, du = self._times_slope(dh * up, gate), dh * gate
        return [dz, jnp.where(h != 0, du, 0.0) if self.both else du]

    def _times_slope(self, dg, gate):
        """`dg act'(z)`, where g is not 0."""
        return dg * (2.0 * jnp.sqrt(gate)) if self.squared else dg


RELU = Rectifier()

_NAMED = {
    "relu": RELU,
    "relu2": Rectifier(squared=True),
    "fatrelu": RELU,  # with the caller's threshold
    "drelu": Rectifier(both=True),
}


def rectifier(activation: str, threshold: float) -> Rectifier | None:
    """The rectifier of this name and threshold; None where the activation is none, as "silu"."""
    named = _NAMED.get(activation)
    return named and replace(named, threshold=threshold)

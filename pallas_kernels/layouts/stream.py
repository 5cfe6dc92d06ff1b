"""The residual stream of a few tokens, on its way from one decoding kernel to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_TOKENS = 64  # that kernels for few tokens take


class Stream(NamedTuple):
    """The residual stream and what the next RMS norm needs, so that no kernel passes over it again.

    A product of the normed stream with W is `(scaled @ W) * rsqrt(sum(squares) / D + eps)`: whoever
    writes `x` also writes the other two, and whoever multiplies finishes the norm on its results.

    Attributes:
      x: `[M, D]`, bfloat16 or float16.
      scaled: `[M, D]`, x times the scale of the norm that comes next, rounded.
      squares: float32 `[M, parts]`, sums of the squares of x over disjoint parts of its columns.
    """

    x: jax.Array
    scaled: jax.Array
    squares: jax.Array

    @classmethod
    def of(cls, x: jax.Array, scale: jax.Array) -> "Stream":
        """The stream `x: [M, D]` in front of a norm with `scale: [D]`."""
        wide = x.astype(jnp.float32)
        scaled = (wide * scale.astype(jnp.float32)).astype(x.dtype)
        return cls(x, scaled, jnp.sum(wide * wide, axis=1, keepdims=True))

    def inverse_rms(self, eps: float) -> jax.Array:
        """`1 / sqrt(mean(x ** 2) + eps)` of each token, float32 `[M, 1]`."""
        mean = jnp.sum(self.squares, axis=1, keepdims=True) / self.x.shape[1]
        return jax.lax.rsqrt(mean + eps)

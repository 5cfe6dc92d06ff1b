"""The residual stream of a few tokens, on its way from one decoding kernel to the next."""

from typing import NamedTuple

import jax
import jax.numpy as jnp

MAX_TOKENS = 64  # that kernels for few tokens take


class Stream(NamedTuple):
    """The residual stream and what the next norm needs, so that no kernel passes over it again.

    In front of an RMS norm, a product of the normed stream with W is
    `(scaled @ W) * rsqrt(sum(squares) / D + eps)`: whoever writes `x` also writes the other two,
    and whoever multiplies finishes the norm on its results.

    Attributes:
      x: `[M, D]`, bfloat16 or float16.
      scaled: `[M, D]`, x times the scale of the norm that comes next, rounded; in front of a layer
        norm, what this makes of x.
      squares: float32 `[M, parts]`, sums of the squares of x over disjoint parts of its columns;
        None in front of a layer norm.
    """

    x: jax.Array
    scaled: jax.Array
    squares: jax.Array | None

    @classmethod
    def of(
        cls, x: jax.Array, scale: jax.Array, bias: jax.Array | None = None, *, eps: float = 0.0
    ) -> "Stream":
        """The stream `x: [M, D]` in front of an RMS norm, or a layer norm if there is a bias.

        Args:
          x: the stream.
          scale, bias: `[D]`, of the norm.
          eps: that of a layer norm.
        """
        wide, scale = x.astype(jnp.float32), scale.astype(jnp.float32)
        if bias is not None:
            wide -= jnp.mean(wide, axis=1, keepdims=True)
            wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=1, keepdims=True) + eps)
            return cls(x, (wide * scale + bias.astype(jnp.float32)).astype(x.dtype), None)
        squares = jnp.sum(wide * wide, axis=1, keepdims=True)
        return cls(x, (wide * scale).astype(x.dtype), squares)

    def inverse_rms(self, eps: float) -> jax.Array:
        """What a product with `scaled` is multiplied with, float32 `[M, 1]`: 1 / sqrt(mean(x^2) +
        eps); 1 in front of a layer norm."""
        if self.squares is None:
            return jnp.ones((len(self.x), 1), jnp.float32)
        mean = jnp.sum(self.squares, axis=1, keepdims=True) / self.x.shape[1]
        return jax.lax.rsqrt(mean + eps)

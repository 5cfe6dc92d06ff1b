"""How many gates of each token are open, which decides how a block of few tokens is computed.

The blocks that compute gates add to these numbers. Atomic additions to the same words follow each
other, so each eight tokens have a row: more tokens do not make a row's additions more.
"""

import jax
import jax.numpy as jnp

_TOKENS_OF_ROW = 8


def zeros(layers: int, tokens: int) -> jax.Array:
    """No gate is open: int32 `[layers, rows, M + 1]`.

    Args:
      layers: number of layers.
      tokens: M, a multiple of 8.
    """
    return jnp.zeros((layers, tokens // _TOKENS_OF_ROW, tokens + 1), jnp.int32)


def of_tokens(counts: jax.Array) -> jax.Array:
    """The open gates of each token, int32 `[layers, M]`, from `counts` as in `zeros`, whose last
    column is not a token's: kernels count there which of their blocks are done."""
    return jnp.sum(counts[..., :-1], axis=-2)

"""How many gates of each token are open, which decides how a block of few tokens is computed.

The blocks that compute gates add to these numbers. Atomic additions to the same words follow each
other, so each eight tokens have a row: more tokens do not make a row's additions more. Behind them,
the first row says how far the kernels are.
"""

import enum
from typing import Any

import jax
import jax.numpy as jnp

_TILE = 64  # neurons
_TOKENS_OF_ROW = 8


class Launch(enum.IntEnum):
    """A layer's launches in which blocks wait for each other."""

    ATTENTION = 0
    GATE = 1
    FFN = 2


def zeros(layers: int, tokens: int, neurons: int) -> jax.Array:
    """No gate is open, no block done: int32 `[layers, rows, M + 3 + H / 64]`.

    Args:
      layers: number of layers.
      tokens: M, a multiple of 8.
      neurons: H, a multiple of 64.
    """
    width = votes(tokens, neurons // _TILE)
    return jnp.zeros((layers, tokens // _TOKENS_OF_ROW, width), jnp.int32)


def arrivals(tokens: int, launch: Launch) -> int:
    """Where a layer's launch counts which of its blocks are done, a column of the first row."""
    return tokens + launch


def votes(tokens: int, tile: int | jax.Array) -> Any:
    """Where the blocks of a tile vote: the gate's kernel computes its hidden activation, too."""
    return tokens + len(Launch) + tile


def of_tokens(counts: jax.Array, tokens: int) -> jax.Array:
    """The open gates of each token, int32 `[layers, M]`, from `counts` as in `zeros`."""
    return jnp.sum(counts[..., :tokens], axis=-2)

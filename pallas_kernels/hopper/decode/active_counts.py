"""How many gates of each token are active, which decides how a feed-forward block is computed.

Each tile of 64 neurons has a column: how far its kernels are, and how many of its gates are active
for each token. So the thread blocks of a tile can clear its numbers before they count; nothing else
must.
"""

import enum

import jax
import jax.numpy as jnp

_TILE = 64  # neurons; a number fits into a byte
_TOKENS_OF_ROW = 4  # bytes of a word


class Launch(enum.IntEnum):
    """A layer's launches in which thread blocks wait for each other: the column of the first row
    in which those that are done are counted."""

    ATTENTION = 0
    GATE = 1
    FFN = 2


def zeros(layers: int, tokens: int, neurons: int) -> jax.Array:
    """No gate is active, no block done: int32 `[layers, 1 + M / 4, 3 + H / 64]`.

    The first row has blocks that are done, by `Launch`, and then the votes of each tile, by which
    the gate's kernel computes its hidden activation, too. Each other row has the active gates of
    four tokens, a byte for each.

    Args:
      layers: number of layers.
      tokens: M, a multiple of 8.
      neurons: H, a multiple of 64.
    """
    kind = shape(layers, tokens, neurons)
    return jnp.zeros(kind.shape, kind.dtype)


def shape(layers: int, tokens: int, neurons: int) -> jax.ShapeDtypeStruct:
    """Shape and dtype of `zeros`."""
    width = column(neurons // _TILE)
    return jax.ShapeDtypeStruct((layers, 1 + tokens // _TOKENS_OF_ROW, width), jnp.int32)


def column(tile: int | jax.Array) -> int | jax.Array:
    """Where the numbers of a tile are."""
    return len(Launch) + tile


def of_tokens(counts: jax.Array) -> jax.Array:
    """The active gates of each token, int32 `[layers, M]`, from `counts` as in `zeros`."""
    words = counts[:, 1:, column(0) :]
    numbers = jnp.sum(words[..., None] >> _shifts() & 0xFF, axis=2)
    return numbers.reshape(len(counts), -1)


def _shifts():
    return 8 * jnp.arange(_TOKENS_OF_ROW, dtype=jnp.int32)

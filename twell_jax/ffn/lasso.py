"""The tile lasso, which is low if neurons are active for whole windows of tokens or not at all.

A group lasso (Yuan and Lin 2006) on the activations of one neuron for the tokens of a window,
`sum_n sqrt(sum_t h_tn^2)`. L1 makes single activations zero, whoever the neighbours are; the time
of a block on tile unions depends on how many neurons neighbouring tokens use between them.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax import lax


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Windows:
    """Windows of consecutive tokens: those of a regular grid, cut where a document ends.

    Attributes:
      offset: int32 [], from 0 to length - 1: how many tokens of the grid's first window lie before
        the first token. Drawn anew for every step, it keeps a model from learning where the grid
        lies.
      documents: int32 `[..., T]`, a number for the document of each token, negative for padding,
        which belongs to no window. None: every sequence is one document, without padding.
      length: tokens of a whole window, 1 or more. As all integers here it must fit into int32.
    """

    offset: jax.Array
    documents: jax.Array | None = None
    length: int = field(default=256, metadata={"static": True})


def tile_lasso(h: jax.Array, windows: Windows) -> jax.Array:
    """Mean over tokens of `sum_n` of the root mean square of h_n over the token's window.

    So a window of k tokens counts `sqrt(k) * sum_n sqrt(sum_t h_tn^2)`, and neurons whose
    activations have one magnitude within each window count as in `FFNStats.l1`; all others count
    more than there, up to `sqrt(k)` times as much. The gradient is exact, and 0 where all
    activations of a neuron in a window are 0; magnitudes below 1e-19, whose squares float32 does
    not hold, count as 0.

    Args:
      h: `[..., T, H]`, hidden activations.
      windows: the windows; `documents` has the leading axes of h.

    Returns:
      float32 []; padding does not count as tokens.
    """
    *leading, tokens, _ = h.shape
    axis, length = len(leading), windows.length
    count = -(-(tokens + length - 1) // length)  # enough for every offset

    def in_grid(a: jax.Array, fill: int) -> jax.Array:
        """`[..., T, *]` as `[..., windows of the grid, length, *]`."""
        shape = (*leading, count * length, *a.shape[axis + 1 :])
        placed = lax.dynamic_update_slice_in_dim(
            jnp.full(shape, fill, a.dtype), a, windows.offset, axis
        )
        return placed.reshape(*leading, count, length, *a.shape[axis + 1 :])

    squares = in_grid(jnp.square(h.astype(jnp.float32)), 0)
    if windows.documents is None:
        is_token = in_grid(jnp.ones((*leading, tokens), jnp.int32), 0)
        member = is_token[..., None, :]
    else:  # the part of a grid's window that each token lies in; it has at most `length`
        documents = jnp.asarray(windows.documents, jnp.int32)  # of unsigned ones, -1 is a document
        found = in_grid(jnp.broadcast_to(documents, h.shape[:-1]), -1)
        changes = found[..., 1:] != found[..., :-1]
        part = jnp.cumsum(jnp.pad(changes, (*(axis + 1) * [(0, 0)], (1, 0))), axis=-1)
        member = (part[..., None, :] == jnp.arange(length)[:, None]) & (found >= 0)[..., None, :]
    member = member.astype(jnp.float32)
    sums = jnp.einsum("...kt,...th->...kh", member, squares, precision="highest")
    sizes = jnp.sum(member, axis=-1)
    return of_sums(sums, sizes) / jnp.maximum(jnp.sum(sizes), 1.0)


def of_sums(sums: jax.Array, sizes: jax.Array) -> jax.Array:
    """The lasso of windows, times the number of tokens, float32 [].

    Args:
      sums: float32 `[..., W, H]`, each neuron's sum of squares over each window.
      sizes: float32 `[..., W]`, the tokens of each window.
    """
    is_active = sums > 0
    norms = jnp.where(is_active, jnp.sqrt(jnp.where(is_active, sums, 1.0)), 0.0)
    return jnp.sum(jnp.sqrt(sizes)[..., None] * norms)

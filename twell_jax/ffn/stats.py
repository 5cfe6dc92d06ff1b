"""Statistics of a block's hidden units, which come with its output."""

from dataclasses import dataclass
from typing import NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import pattern_shares
from pallas_kernels.layouts import tile_union
from twell_jax.ffn import partition
from twell_jax.ffn.lasso import Windows, tile_lasso

UNION_TOKENS = tile_union.TILE_TOKENS  # `FFNStats.union` is of so many tokens,
UNION_NEURONS = tile_union.CHUNK_NEURONS  # in started chunks of so many neurons
NOT_MEASURED = -1.0  # rather than NaN, at which JAX can be told to stop


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FFNStats:
    """Statistics of the hidden units over all tokens of one call.

    Attributes:
      l1: float32 [], mean over tokens of sum_n |h_n|; differentiable (arXiv 2603.23198, recipe).
      nnz: float32 [], mean over tokens of the number of non-zero activations (of g, if gated).
      max_nnz: int32 [], the largest number of non-zero activations of any token.
      fired: bool [H], whether a neuron was non-zero for any token.
      overflow: float32 [], 1 if sparse gradients were asked for, but their pattern exceeded
        the capacity, so that they are computed densely; else 0.
      union: float32 [], the share of H that 256 neighbouring tokens use between them, mean over
        these tiles of tokens, in started chunks of 128 neurons. Tokens that would leave their union
        do not count. The kernels for few tokens and for TwELL do not measure it: -1.
      listed: float32 [], the share of the groups of 64 neurons that a token uses, mean over tokens,
        in started lists of 64 tokens; -1 where `union` is.
      tiles: int32 [H], in how many tiles of 256 neighbouring tokens a neuron was non-zero;
        negative with TwELL, which does not measure it.
      lasso: float32 [], the `tile_lasso` of h over the windows given, differentiable; None without.

    Sparse gradients do not overflow if x is finite and neither `union` nor `listed` is larger than
    their capacity (`pallas_kernels.pattern_shares`). On a mesh each device that runs kernels
    has its own tokens and neurons: these two are then means over devices, and `tiles` counts its
    own.
    """

    l1: jax.Array
    nnz: jax.Array
    max_nnz: jax.Array
    fired: jax.Array
    overflow: jax.Array
    union: jax.Array
    listed: jax.Array
    tiles: jax.Array
    lasso: jax.Array | None = None


def no_stats(d_ff: int) -> FFNStats:
    """The statistics of a block of H neurons that was not called: zeros."""
    return FFNStats(
        l1=jnp.zeros((), jnp.float32),
        nnz=jnp.zeros((), jnp.float32),
        max_nnz=jnp.zeros((), jnp.int32),
        fired=jnp.zeros(d_ff, bool),
        overflow=jnp.zeros((), jnp.float32),
        union=jnp.zeros((), jnp.float32),
        listed=jnp.zeros((), jnp.float32),
        tiles=jnp.zeros(d_ff, jnp.int32),
    )


class Output(NamedTuple):
    """What kernels return for a block on M tokens.

    Attributes:
      y: `[M, D]`.
      nnz: int32 `[M]`, each token's non-zero activations (of g, if gated).
      l1: float32 [], the sum of |h| over all tokens.
      fired: bool `[H]`, whether a neuron was non-zero for any token.
      tiles: int32 `[H]`, see `FFNStats`.
      union, listed: float32 [], likewise.
      lasso: float32 [], `lasso.of_sums`; None if it is not wanted.
    """

    y: jax.Array
    nnz: jax.Array
    l1: jax.Array
    fired: jax.Array
    tiles: jax.Array
    union: jax.Array | float = NOT_MEASURED
    listed: jax.Array | float = NOT_MEASURED
    lasso: jax.Array | None = None

    def with_stats(self, overflow: jax.Array | float = 0.0) -> tuple[jax.Array, FFNStats]:
        """y and the `FFNStats` over all tokens."""
        return self.y, FFNStats(
            l1=self.l1 / self.nnz.size,
            nnz=jnp.mean(self.nnz, dtype=jnp.float32),
            max_nnz=jnp.max(self.nnz),
            fired=self.fired,
            overflow=jnp.asarray(overflow, jnp.float32),
            union=jnp.asarray(self.union, jnp.float32),
            listed=jnp.asarray(self.listed, jnp.float32),
            tiles=self.tiles,
            lasso=None if self.lasso is None else self.lasso / self.nnz.size,
        )


def of_dense(h: jax.Array, active: jax.Array, windows: Windows | None = None) -> FFNStats:
    """The statistics of dense activations.

    Args:
      h: `[..., H]`, the hidden activations, which y is made of.
      active: `[..., H]`, the output of the activation function (see `activations.hidden`).
      windows: those of the tile lasso, if it is wanted.
    """
    nonzero = active != 0
    union, listed = pattern_shares.of_dense(nonzero, devices=partition.devices().tokens)
    nnz = jnp.sum(nonzero, axis=-1, dtype=jnp.int32)
    # The barrier keeps sums of tokens apart from their mean. XLA then makes both sums of a token
    # while it computes h, and does not read all activations once more for nnz.
    l1 = jax.lax.optimization_barrier(jnp.sum(jnp.abs(h), axis=-1, dtype=jnp.float32))
    return FFNStats(
        l1=jnp.mean(l1),
        nnz=jnp.mean(nnz, dtype=jnp.float32),
        max_nnz=jnp.max(nnz),
        fired=jnp.any(nonzero, axis=tuple(range(h.ndim - 1))),
        overflow=jnp.zeros((), jnp.float32),
        union=union,
        listed=listed,
        tiles=tile_union.tiles_of_dense(nonzero),
        lasso=None if windows is None else tile_lasso(h, windows),
    )

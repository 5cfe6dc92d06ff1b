"""What the forward of a block on tile unions keeps for its backward, and what that chooses."""

import enum
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import pattern_shares
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, MAX_HEAVY, Plan
from twell_jax.ffn.union_lasso import WindowSums


class Way(enum.IntEnum):
    """How `backward` computes the gradients, by what the forward found."""

    RECOMPUTE = 0  # densely from the operands, as what was kept is not complete
    SPARSE = 1  # by the kernels, as unions and lists hold all tokens
    SPARSE_AND_FEW = 2  # by the kernels, and for up to `FEW` tokens outside the unions by XLA
    SPARSE_AND_HEAVY = 3  # the same, for up to `MAX_HEAVY` of them
    DENSE = 4  # as for `SPARSE`, but those for weights by dense products, as these are faster
    DENSE_AND_HEAVY = 5  # the same, and for tokens outside the unions besides


# What gradients for weights take, in shares of the time of dense forward and backward: sums over
# lists, with what stores these, times the share that is listed; and dense products. See
# docs/design/0009-sparse-gradients.md.
_OF_LISTS, _OF_DENSE = 0.54, 0.41

FEW = 64  # outside the unions, as of most patterns: `MAX_HEAVY` rows would be padding for them


class Deciding(NamedTuple):
    """What the way of the backward depends on, as arrays of a device or on the host.

    Attributes:
      needs: int32 `[2]`, of `tile_union.needs_of`.
      slots: int32 [], that all lists would take without a limit.
      heavy: int32 [], how many tokens are outside the unions.
    """

    needs: Any
    slots: Any
    heavy: Any

    def fits(self, room: int) -> Any:
        """Whether the pattern fits into the capacity, whose lists have so many slots: bool []."""
        return (self.slots <= room) & (self.heavy <= MAX_HEAVY) & (self.needs[1] == 0)

    def way(self, room: int, m: int, h: int, capacity: float) -> Any:
        """The `Way` for m tokens and h neurons, int32 []."""
        listed = pattern_shares.listed(self.slots, m, h)
        dense = may_be_dense(capacity) and dense_is_faster(listed)
        sparse = Way.SPARSE + (self.heavy > FEW)
        return self.fits(room) * (dense * Way.DENSE + (1 - dense) * sparse + (self.heavy > 0))

    def gains(self, room: int, m: int, h: int, gated: bool) -> bool:
        """Whether both passes take less time than all dense; on the host alone.

        Of nine products, or six without a gate, one is dense and a third make the gradients for
        weights. The time of the others follows the unions.
        """
        shares = pattern_shares.of_packed(self.needs[0], self.slots, m, h)
        union, listed = map(float, shares)
        products = 9 if gated else 6
        time = (1 + (2 / 3 * products - 1) * union) / products + min(_OF_LISTS * listed, _OF_DENSE)
        return bool(self.fits(room) and time < 1)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Residuals:
    """What the forward keeps for the backward, besides its operands.

    Attributes:
      hidden: h and the gates, as blocks from `union_up`.
      plan: which neurons and tokens each block holds.
      needs: int32 `[2]`, of `tile_union.needs_of`.
      lists: the tokens that use each group of neurons.
      lengths: int32 `[H / 64]`, of the lists, before any is cut off.
      heavy_count: int32 `[1]`, how many tokens are outside the unions.
      heavy: int32 `[M or more]`, these tokens; unspecified from `heavy_count` on.
      heavy_hidden: `[2, 256, H]`, their gates and h, or `[1, 256, H]`, h alone, in the non-gated
        form; unspecified from row `heavy_count` on.
      window_sums: what the gradient of the lasso follows from, always complete; None without it.
    """

    hidden: jax.Array
    plan: Plan
    needs: jax.Array
    lists: NeuronLists
    lengths: jax.Array
    heavy_count: jax.Array
    heavy: jax.Array
    heavy_hidden: jax.Array
    window_sums: WindowSums | None = None

    # Computed where they are used, by one kernel with what uses them; as fields each would be one.

    @property
    def deciding(self) -> Deciding:
        """What the way of the backward depends on."""
        return Deciding(self.needs, self.lists.wanted(self.lengths), self.heavy_count[0])

    @property
    def fits(self) -> jax.Array:
        """Whether the pattern fits into the capacity: bool []. Else other fields are incomplete."""
        return self.deciding.fits(self.lists.tokens.size)

    @property
    def overflow(self) -> jax.Array:
        """Whether the pattern exceeded the capacity: float32 [], 1 or 0."""
        return (~self.fits).astype(jnp.float32)

    def way(self, m: int, capacity: float) -> jax.Array:
        """The `Way` for m tokens, int32 []."""
        h = GROUP_NEURONS * self.lengths.size
        return self.deciding.way(self.lists.tokens.size, m, h, capacity).astype(jnp.int32)

    def heavy_tokens(self, most: int, m: int) -> jax.Array:
        """The tokens outside the unions, int32 `[most]` or fewer, padded with m."""
        tokens = self.heavy[:most]
        return jnp.where(jnp.arange(tokens.size) < self.heavy_count, tokens, m)


def dense_is_faster(listed: jax.Array | float) -> jax.Array | bool:
    """Whether dense products for the weights take less time than sums over the lists.

    Args:
      listed: as in `FFNStats`.
    """
    return _OF_LISTS * listed > _OF_DENSE


def may_be_dense(capacity: float) -> bool:
    """Whether they may be, for a pattern that fits; if not, no memory is reserved for them."""
    return bool(dense_is_faster(capacity))

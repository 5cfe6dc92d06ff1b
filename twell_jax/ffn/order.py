"""An order of a block's neurons that changes the work of kernels, not the function.

The gradients of weights sum over lists of the tokens that use any of 64 neighbouring neurons
(`neuron_lists`). If neighbours are active equally often, most lists are short. So `order_by_use`
sorts neurons by how often they are active. But no group of 64 shall hold so many of the busiest
that ordinary tokens seem outlying in it (`tile_union`), so these are dealt out to some groups. See
docs/design/0009.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.tile_union import GROUP_NEURONS, OUTLYING_ABOVE

_NNZ_OF_GROUP = OUTLYING_ABOVE / 4  # a token's mean non-zeros in a group of the busiest, at most


def order_by_use(tiles: jax.Array, nnz: jax.Array) -> jax.Array:
    """An order of neurons with which the lists of sparse gradients are short.

    Rows of `w_gate`, `w_up` and `w_down`, and what an optimizer keeps for them, belong in this
    order: `w_gate[order]`. Neurons that were never active come last and keep their order. So do
    all with the statistics of TwELL, which does not measure how often they are active.

    Args:
      tiles: int32 [H], how often each neuron was active, as `FFNStats.tiles` says.
      nnz: float32 [], mean number of non-zeros per token (`FFNStats.nnz`).

    Returns:
      int32 [H], the former index of each neuron.
    """
    ranked = jnp.argsort(-tiles, stable=True).astype(jnp.int32)
    used = jnp.sum(tiles > 0)
    groups = jnp.ceil(nnz / _NNZ_OF_GROUP).astype(jnp.int32)
    groups = jnp.clip(groups, 1, jnp.maximum(used // GROUP_NEURONS, 1))
    # By rank: the first 64 `groups` go to as many groups in turn.
    rank = jnp.arange(tiles.size)
    in_turn = rank % groups * GROUP_NEURONS + rank // groups
    places = jnp.where(rank < GROUP_NEURONS * groups, in_turn, rank)
    return jnp.zeros_like(ranked).at[places].set(ranked)

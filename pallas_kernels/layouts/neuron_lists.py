"""Neuron lists: for each group of neurons, the tokens that use any of them.

Weight gradients such as `h^T dy` sum over tokens, and `h: [M, H]` is zero nearly everywhere. The H
neurons are cut into groups of 64, those of `tile_union`. A group's list holds, in ascending
order, the tokens with a non-zero for any of its neurons; the group's rows of a gradient are one
dense matmul over these tokens. The lists lie one after the other in C slots, and each starts at a
multiple of 64:

    slot     0   1   2       ...       64  65       ...       128         C
    token    3  17  90  padding         0  12  padding         |  padding
             list 0, length 3          list 1, length 2        list 2, length 0

A matrix `[M, H]` with this pattern becomes `[C, 64]`: row s holds the entries of slot s's token for
the 64 neurons of its list.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

SLOT_ALIGNMENT = 64  # lists begin at multiples of it, so each takes a multiple of so many slots


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class NeuronLists:
    """Which token is in which slot.

    Attributes:
      tokens: int32 `[C]`, the token in each slot; unspecified in padding.
      starts: int32 `[H / 64]`, the first slot of each list, a multiple of 64; at most C.
      lengths: int32 `[H / 64]`, tokens in each list; no list ends after C.
      words: int32 `[H / 64, T / 32, 2]`, T = 256 ceil(M / 256): bit t % 32 of `[b, t // 32, 0]` is
        set if token t is in list b; `[b, t // 32, 1]` is the slot of the first such token of these
        32. The slots of the others follow.
      order: int32 `[H / 64]`, the lists by length, before any is cut off: the longest one first,
        equal ones in order.
    """

    tokens: jax.Array
    starts: jax.Array
    lengths: jax.Array
    words: jax.Array
    order: jax.Array

    def wanted(self, lengths: jax.Array) -> jax.Array:
        """The slots that all lists would take without a limit, int32 []; `lengths` are theirs then.

        That is where the last one begins, and its own: no list is cut off in `words`.
        """
        return self.words[-1, 0, 1] + slots_for(lengths[-1])

    def slots(self, tokens: jax.Array) -> jax.Array:
        """The slot of each token `[n]` in each list, int32 `[H / 64, n]`; C if it has none."""
        bits, first = jnp.moveaxis(self.words[:, tokens // 32], -1, 0)
        bits = lax.bitcast_convert_type(bits, jnp.uint32)
        bit = jnp.uint32(1) << (tokens % 32).astype(jnp.uint32)
        slot = first + lax.population_count(bits & (bit - 1)).astype(jnp.int32)
        capacity = self.tokens.size
        return jnp.where((bits & bit != 0) & (slot < capacity), slot, capacity)


def list_lengths(counts: jax.Array, m: int) -> jax.Array:
    """How many of the first m tokens use each group, int32 `[H / 64]`.

    Args:
      counts: uint8 `[H / 64, T]`, as `gate_union` returns it: token t uses group b if the low 7
        bits of `[b, t]` are not 0.
      m: number of tokens.
    """
    is_listed = (counts & 127 != 0) & (jnp.arange(counts.shape[1]) < m)
    return jnp.sum(is_listed, axis=1, dtype=jnp.int32)


def slots_for[Array: (jax.Array, np.ndarray)](lengths: Array) -> Array:
    """How many slots each list of these lengths, int32 `[H / 64]`, needs."""
    return -(-lengths // SLOT_ALIGNMENT) * SLOT_ALIGNMENT

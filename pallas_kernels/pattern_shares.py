"""The capacity that the sparse gradients of a pattern need, as shares of what any pattern needs.

    union     work items, of the R H / 128 that there are if every neuron is active in every tile:
              each row tile has one for every started chunk of 128 neurons of its union
              (`tile_union`)
    listed    list slots, of the R 256 H / 64 that there are if in every group of 64 neurons one is
              active for every token: each group has one for every such token, rounded up to a
              multiple of 64 (`neuron_lists`)

A finite pattern fits into a share of the memory if neither is larger. Tokens that leave their union
do not count in the first.
"""

from typing import Any

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.neuron_lists import SLOT_ALIGNMENT, slots_for
from pallas_kernels.layouts.tile_union import (
    CHUNK_NEURONS,
    GROUP_NEURONS,
    MAX_HEAVY,
    OUTLYING_ABOVE,
    TILE_TOKENS,
)


def of_packed(chunks: Any, slots: Any, m: int, h: int) -> tuple[Any, Any]:
    """(union, listed), float32 [], of m tokens and h neurons whose gate `gate_union` describes; of
    numbers on the host, numbers.

    Args:
      chunks: int32 [], that all unions have, of `tile_union.needs_of`.
      slots: int32 [], that all lists have.
    """
    return chunks / (-(-m // TILE_TOKENS) * (h // CHUNK_NEURONS)), listed(slots, m, h)


def listed(slots: Any, m: int, h: int) -> Any:
    """The second of them alone, of an array or of a number on the host."""
    return slots / (-(-m // TILE_TOKENS) * TILE_TOKENS * (h // GROUP_NEURONS))


def of_dense(active: jax.Array, devices: int = 1) -> tuple[jax.Array, jax.Array]:
    """(union, listed), float32 [], of dense activations.

    Args:
      active: `[..., H]`, of any dtype; its tokens are cut into tiles in order. H may be any number.
      devices: over how many the tokens are split, each of which lets `MAX_HEAVY` tokens leave.
    """
    h = active.shape[-1]
    used = jnp.pad(tile_union.in_tiles(active), ((0, 0), (0, 0), (0, -h % GROUP_NEURONS)))
    used = used.reshape(*used.shape[:2], -1, GROUP_NEURONS)
    counts = jnp.sum(used, axis=-1, dtype=jnp.int32)
    is_usual = (counts <= OUTLYING_ABOVE)[..., None]
    every, usual = (
        jnp.sum(jnp.any(a, axis=1), axis=(1, 2), dtype=jnp.int32) for a in (used, used & is_usual)
    )
    outlying = jnp.sum(jnp.any(counts > OUTLYING_ABOVE, axis=-1), axis=1, dtype=jnp.int32)
    lengths = jnp.sum(counts != 0, axis=(0, 1), dtype=jnp.int32)
    chunks = tile_union.chunks_needed(every, usual, outlying, h, MAX_HEAVY * devices)
    pieces = slots_for(lengths) // SLOT_ALIGNMENT
    all_chunks = every.size * -(-h // CHUNK_NEURONS)
    all_pieces = every.size * (TILE_TOKENS // SLOT_ALIGNMENT) * lengths.size
    return (
        jnp.sum(chunks, dtype=jnp.float32) / all_chunks,
        jnp.sum(pieces, dtype=jnp.float32) / all_pieces,
    )

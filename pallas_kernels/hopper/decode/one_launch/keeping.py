"""How the query, key and value of a new token are kept: in shared memory, and in the cache."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.decode.one_launch import lane, memory
from pallas_kernels.hopper.decode.one_launch.block import Block, Unit
from pallas_kernels.hopper.decode.one_launch.tokens import scale_of
from pallas_kernels.quantised import Quantised, values_of


class Vector(NamedTuple):
    """What each lane has a part of.

    Attributes:
      number: of the vector in "q".
      is_key, is_value: whether it is one, or a query.
      lanes: neighbours that have it together.
    """

    number: jax.Array
    is_key: jax.Array
    is_value: jax.Array
    lanes: int


def keep(block: Block, layer, of: Unit, vector: Vector, places, words) -> None:
    """Stores words of vectors to "q", and those of keys and values also to the cache.

    In a cache of 8 bits they are rounded, and then in "q", too.

    Args:
      block, layer, of: of the token.
      vector: of each lane.
      places: where in the vector a lane's words are; negative if there are none.
      words: of two bfloat16 each.
    """
    caches = block.refs.k, block.refs.v
    if isinstance(block.refs.k, Quantised):
        stored, rounded, scale = _rounded(vector, places, words)
        is_stored = vector.is_key | vector.is_value
        words = [jnp.where(is_stored, one, word) for one, word in zip(rounded, words, strict=True)]
        is_first = (lane.numbers() & (vector.lanes - 1) == 0) & (places[0] >= 0)
        bits = lax.bitcast_convert_type(scale, jnp.int32)
        for cache, is_its in zip(caches, (vector.is_key, vector.is_value), strict=True):
            slot = cache.scale.at[layer, of.stored, of.head]
            memory.store(slot, jnp.where(is_first & is_its, of.length, -1), bits)
    else:
        stored = words
    row = vector.number * (block.shape.size // 2 + 4)
    for at, word, kept in zip(places, words, stored, strict=True):
        memory.scatter(block.smem["q"], jnp.where(at < 0, -1, row + at), word)
        for cache, is_its in zip(caches, (vector.is_key, vector.is_value), strict=True):
            slot = values_of(cache).at[layer, of.stored, of.length, of.head]
            memory.store(slot, jnp.where(is_its, at, -1), kept, bytes_of=2 * slot.dtype.itemsize)


def _rounded(vector: Vector, places, words):
    """Words whose lower halves are two 8-bit floats; the words that these stand for; the scale."""
    there = [jnp.where(at < 0, 0, word) for at, word in zip(places, words, strict=True)]
    (largest,) = lane.largest_of([there], vector.lanes)
    scale = scale_of(lax.bitcast_convert_type(largest, jnp.float32))
    stored, rounded = [], []
    for word in there:
        low, high = (half * (1 / scale) for half in lane.unpack(word))
        stored.append(lane.pack_four([low, high, low, high]))
        low, high, *_ = lane.unpack_four(stored[-1])
        rounded.append(lane.pack(low * scale, high * scale))
    return stored, rounded, scale

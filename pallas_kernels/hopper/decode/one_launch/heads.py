"""Attention of a thread block's units, a split of a group of heads of a sequence each.

The first split takes what the others attend to, and adds it to its own and to the new token.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import attention, exchange, lane, memory
from pallas_kernels.hopper.decode.one_launch.block import Block, Unit
from pallas_kernels.hopper.decode.one_launch.keeping import Vector, keep
from pallas_kernels.hopper.decode.one_launch.key_products import room_of
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WARP
from pallas_kernels.hopper.decode.one_launch.products import LOG2_E
from pallas_kernels.hopper.decode.one_launch.shape import UNITS, Shape
from pallas_kernels.quantised import Quantised


def attend(block: Block, layer, exchange_number, number, eps: float):
    """What this block's units attend to; their keys and values also go to the cache."""
    shape, smem = block.shape, block.smem

    def unit(i, number):
        of = block.unit(i)
        place_new(block, layer, exchange_number, of, eps)
        block.meet()
        q = attention.queries(smem["q"], shape.size, shape.stored_bytes)

        def stage(j, carry):
            number, state, scales = carry
            slots = [lax.rem(number + k, shape.slots) for k in (0, 1)]
            for slot in slots:
                plgpu.barrier_wait(block.full.at[slot])
            later = _scales_of_stage(block, layer, of, j + 1)
            state = attention.attend(
                *(block.kv_ring.at[slot] for slot in slots),
                q, attention.State(*state), of.start - j * shape.keys, of.length - j * shape.keys,
                block.wg, scales, size=shape.size,
            )  # fmt: skip
            for slot in slots:
                plgpu.barrier_arrive(block.empty.at[slot])
            return number + 2, tuple(state), later

        first_scales = _scales_of_stage(block, layer, of, of.first)
        start = number, tuple(attention.State.empty()), first_scales
        number, state, _ = lax.fori_loop(of.first, of.end, stage, start)
        put_state(block, attention.State(*state))
        is_first = of.split == 0
        if shape.key_splits > 1:
            pl.when(is_first)(lambda: take_splits(block, exchange_number + 1, of))
        block.meet()
        pl.when(is_first)(lambda: add_new(block, exchange_number + 2, of))
        if shape.key_splits > 1:
            pl.when(~is_first)(lambda: post_split(block, exchange_number + 1, of))
        block.meet()  # before the next unit's query comes
        return number

    return lax.fori_loop(0, block.many[UNITS], unit, number)


def _scales_of_stage(block: Block, layer, of: Unit, j) -> list[jax.Array]:
    """Of a stage of keys and values in 8 bits; they are asked for a stage ahead."""
    shape = block.shape
    return [
        scale
        for cache in (block.refs.k, block.refs.v)
        if isinstance(cache, Quantised)
        for scale in attention.scales_of(
            cache.scale.at[layer, of.stored, of.head], j * shape.keys, shape.size, block.wg
        )
    ]


def place_new(block: Block, layer, exchange_number, of: Unit, eps: float) -> None:
    """Rotates query and key of the new token; `q` gets them and the value, the cache the latter.

    If a key/value head has several groups, all of them store the same.
    All splits have the query, and the first one the others. A lane has two features of a vector and
    their partners, or four that are not rotated; in a vector of 256, twice as many.
    """
    shape = block.shape
    lanes = min(room_of(shape.size) // 4, WARP)  # of a vector
    vectors = jnp.where(of.split == 0, shape.group + 2, shape.group)
    for start in range(0, (shape.group + 2) * lanes, 2 * LANES):
        index = block.thread() + start
        vector, first = index >> (lanes.bit_length() - 1), index & (lanes - 1)
        is_its = vector < vectors
        is_key, is_value = vector == shape.group, vector == shape.group + 1
        of_query = of.group * shape.group + vector
        stored = jnp.where(is_key, shape.heads, shape.heads + shape.kv_heads) + of.head
        of_all = jnp.where(is_key | is_value, stored, of_query)
        before = of_all * (shape.size // 2)
        pairs = [_pair(shape, is_its, first + more) for more in range(0, shape.size // 4, lanes)]
        words = [word for pair in pairs for word in pair.words]
        scales = _scales_of_heads(block, layer, is_key, words)
        places = [exchange.place_of(of.sequence, before + word, shape.projected) for word in words]
        places = [jnp.where(at < 0, -1, place) for at, place in zip(words, places, strict=True)]
        turns = [_turn(block, of, pair) for pair in pairs]
        given = exchange.take(block.refs.words, exchange_number, places)
        normed = given if scales is None else _normed(given, scales, lanes, shape.size, eps)
        rotated = [
            word
            for i, (pair, turn) in enumerate(zip(pairs, turns, strict=True))
            for word in _rotated(pair, turn, *normed[2 * i : 2 * i + 2])
        ]
        kept = [jnp.where(is_value, a, word) for a, word in zip(given, rotated, strict=True)]
        keep(block, layer, of, Vector(vector, is_key, is_value, lanes), words, kept)


class _Pair(NamedTuple):
    """Two words of a vector, which are rotated together if at all.

    Attributes:
      j: their number.
      words: their places in the vector; negative if there are none.
      is_turned: whether they are rotated.
    """

    j: jax.Array
    words: list[jax.Array]
    is_turned: jax.Array


def _pair(shape: Shape, is_its, j) -> _Pair:
    quarter, turned = shape.size // 4, shape.rotated // 4
    is_turned = j < turned
    words = jnp.where(is_turned, j, j + turned), j + jnp.where(is_turned, turned, quarter)
    is_there = is_its & (j < quarter)
    return _Pair(j, [jnp.where(is_there, word, -1) for word in words], is_turned)


def _turn(block: Block, of: Unit, pair: _Pair):
    """Cosines and sines of a lane's two angles."""
    place = of.sequence * (block.shape.rotated // 2) + 2 * pair.j
    place = jnp.where((pair.words[0] >= 0) & pair.is_turned, place, -1)
    return [
        [lax.bitcast_convert_type(one, jnp.float32) for one in memory.load(table, place, 2)]
        for table in block.refs.rope
    ]


def _rotated(pair: _Pair, turn, x, y):
    (a0, a1), (b0, b1) = lane.unpack(x), lane.unpack(y)
    cos, sin = turn
    low = lane.pack(a0 * cos[0] - b0 * sin[0], a1 * cos[1] - b1 * sin[1])
    high = lane.pack(b0 * cos[0] + a0 * sin[0], b1 * cos[1] + a1 * sin[1])
    return jnp.where(pair.is_turned, low, x), jnp.where(pair.is_turned, high, y)


def _scales_of_heads(block: Block, layer, is_key, places):
    """The scales of the norm of a lane's features, or None if there is no such norm."""
    if block.refs.head_scales is None:
        return None
    of_query, of_key = (
        [memory.load(scale.at[layer], place)[0] for place in places]
        for scale in block.refs.head_scales
    )
    return [jnp.where(is_key, k, q) for q, k in zip(of_query, of_key, strict=True)]


def _normed(words, scales, lanes: int, size: int, eps: float):
    """Words of a head whose others lie in so many neighbouring lanes, behind its RMS norm."""
    squares = lane.sum_of(lane.sum_of_squares(words), lanes)
    factor = lax.rsqrt(squares / size + eps)
    pairs = zip(map(lane.unpack, words), map(lane.unpack, scales), strict=True)
    return [lane.pack(low * factor * by[0], high * factor * by[1]) for (low, high), by in pairs]


def put_state(block: Block, state: attention.State) -> None:
    """Stores what each warp knows."""
    shape, smem, thread = block.shape, block.smem, block.thread()
    tiles = attention.key_tiles(shape.size)
    warp, head, quad = thread >> 5, (thread >> 2) & 7, thread & 3
    tile, features = warp & (tiles - 1), (warp >> (tiles.bit_length() - 1)) * 64
    is_there = head < shape.group
    row = tile * shape.group + head
    for i, value in enumerate(state.values):
        feature = features + attention.feature_of(i, quad, shape.stored_bytes)
        has = is_there & (feature < shape.size)
        memory.scatter(smem["values"], jnp.where(has, row * shape.size + feature, -1), value)
    total = lane.sum_of(state.total, 4)
    is_one = is_there & (quad == 0) & (features == 0)
    for i, value in enumerate((state.top, total)):
        memory.scatter(smem["tops"], jnp.where(is_one, 2 * row + i, -1), value)


def post_split(block: Block, exchange_number, of: Unit) -> None:
    """Merges what the warps have, and posts it.

    Of each group of a sequence, the exchange has the values of all splits but the first,
    `[splits - 1, group, size]`, and then their tops and totals, `[splits - 1, group, 2]`.
    """
    shape = block.shape
    size, room = shape.size, room_of(shape.size)
    before, states = (of.split - 1) * shape.group, attention.key_tiles(size)
    values = _first_word(block, of)
    tops = values + (shape.key_splits - 1) * shape.group * size
    for start in range(0, shape.group * room, 2 * LANES):
        index = block.thread() + start
        own, feature = index >> (room.bit_length() - 1), index & (room - 1)
        is_there = (own < shape.group) & (feature < size)
        row, feature = (jnp.where(is_there, one, 0) for one in (own, feature))
        least = lane.full(attention.LEAST, jnp.float32)
        top, total, factors = _merged(block, row, states, least)
        value = _sum_of_states(block, factors, row * size + feature)
        place = jnp.where(is_there, values + (before + own) * size + feature, -1)
        of_top = jnp.where(is_there & (feature < 2), tops + 2 * (before + own) + feature, -1)
        for places, number in ((place, value), (of_top, jnp.where(feature == 0, top, total))):
            bits = lax.bitcast_convert_type(number, jnp.int32)
            exchange.post(block.refs.words, exchange_number, places, bits)


def take_splits(block: Block, exchange_number, of: Unit) -> None:
    """Takes what the other splits have, as further rows of what this block's warps have."""
    shape, smem = block.shape, block.smem
    first, many = _first_word(block, of), shape.merged_words
    own = attention.key_tiles(shape.size) * shape.group  # rows
    values = (shape.key_splits - 1) * shape.group * shape.size
    indices = [block.thread() + start for start in range(0, many, 2 * LANES)]
    places = [jnp.where(index < many, first + index, -1) for index in indices]
    words = exchange.take(block.refs.words, exchange_number, places)
    for index, word in zip(indices, words, strict=True):
        number = lax.bitcast_convert_type(word, jnp.float32)
        is_top = (index >= values) & (index < many)
        place = jnp.where(index < values, own * shape.size + index, -1)
        memory.scatter(smem["values"], place, number)
        memory.scatter(smem["tops"], jnp.where(is_top, 2 * own + index - values, -1), number)


def _first_word(block: Block, of: Unit):
    """Where the words of the splits of a group begin in their exchange."""
    return (of.sequence * block.shape.groups + of.group) * block.shape.merged_words


def _merged(block: Block, row, states: int, top):
    """Top and total of what so many states of a head have, of at least `top`, and what to multiply
    the values of each with; a state without keys has a total of 0."""
    tops, totals = (
        memory.gather_each(block.smem["tops"], 2 * row + i, states, 2 * block.shape.group)
        for i in (0, 1)
    )
    for one in tops:
        top = jnp.maximum(top, one)
    factors, total = [lane.exp2(one - top) for one in tops], lane.full(0.0, jnp.float32)
    for f, one in zip(factors, totals, strict=True):
        total += f * one
    return top, total, factors


def _sum_of_states(block: Block, factors, place):
    """The sum of the values at `place` of the states, times their factors."""
    of_state = block.shape.group * block.shape.size
    values = memory.gather_each(block.smem["values"], place, len(factors), of_state)
    total = lane.full(0.0, jnp.float32)
    for factor, value in zip(factors, values, strict=True):
        total += factor * value
    return total


def add_new(block: Block, exchange_number, of: Unit) -> None:
    """Adds up what warps and other splits have and the new token; a warp has a head."""
    shape, smem, thread = block.shape, block.smem, block.thread()
    states, words = smem["tops"].shape[0], shape.size // 2 + 4
    own, number = thread >> 5, thread & 31
    is_there = own < shape.group
    mine = jnp.where(is_there, own, 0)
    pairs = [number + WARP * i for i in range(-(-shape.size // (2 * WARP)))]
    last = shape.size // 2 - 1
    are_there = [True if shape.size % (2 * WARP) == 0 else pair <= last for pair in pairs]
    pairs = [jnp.minimum(pair, last) for pair in pairs]
    key, value = ([memory.gather(smem["q"], r * words + pair) for pair in pairs]
                  for r in (shape.group, shape.group + 1))  # fmt: skip
    score = lane.full(0.0, jnp.float32)
    for pair, word, has in zip(pairs, key, are_there, strict=True):
        q, k = lane.unpack(memory.gather(smem["q"], mine * words + pair)), lane.unpack(word)
        score += jnp.where(has, q[0] * k[0] + q[1] * k[1], 0.0)
    score = lane.sum_of(score) * (LOG2_E / shape.size**0.5)
    top, total, factors = _merged(block, mine, states, score)
    factor = lane.exp2(score - top)
    total += factor
    for pair, word, has in zip(pairs, value, are_there, strict=True):
        at = mine * shape.size + 2 * pair
        sums = [
            factor * half + _sum_of_states(block, factors, at + i)
            for i, half in enumerate(lane.unpack(word))
        ]
        head = of.group * shape.group + own
        word = head * (shape.size // 2) + pair
        place = exchange.place_of(of.sequence, word, shape.attended)
        places = jnp.where(is_there & has, place, -1)
        packed = lane.pack(sums[0] / total, sums[1] / total)
        exchange.post(block.refs.words, exchange_number, places, packed)

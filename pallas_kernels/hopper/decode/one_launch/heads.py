"""Attention of a thread block's units, a split of a key/value head of a sequence each.

The first split takes what the others attend to, and adds it to its own and to the new token.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import attention, exchange, lane, memory
from pallas_kernels.hopper.decode.one_launch.block import Block, Unit
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.products import LOG2_E
from pallas_kernels.hopper.decode.one_launch.shape import UNITS


def attend(block: Block, layer, exchange_number, number, eps: float):
    """What this block's units attend to; their keys and values also go to the cache."""
    shape, smem = block.shape, block.smem

    def unit(i, number):
        of = block.unit(i)
        place_new(block, layer, exchange_number, of, eps)
        block.meet()
        q = attention.queries(smem["q"], shape.size)

        def stage(j, carry):
            number, state = carry
            slots = [lax.rem(number + k, shape.slots) for k in (0, 1)]
            for slot in slots:
                plgpu.barrier_wait(block.full.at[slot])
            state = attention.attend(
                *(block.kv_ring.at[slot] for slot in slots),
                q, attention.State(*state), of.start - j * shape.keys, of.length - j * shape.keys,
                block.wg, size=shape.size,
            )  # fmt: skip
            for slot in slots:
                plgpu.barrier_arrive(block.empty.at[slot])
            return number + 2, tuple(state)

        start = number, tuple(attention.State.empty())
        number, state = lax.fori_loop(of.first, of.end, stage, start)
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


def place_new(block: Block, layer, exchange_number, of: Unit, eps: float) -> None:
    """Rotates query and key of the new token; `q` gets them and the value, the cache the latter.

    All splits have the query, and the first one the others. A lane has two features of a vector and
    their partners, or four that are not rotated.
    """
    shape, refs, smem = block.shape, block.refs, block.smem
    quarter, vectors = shape.size // 4, jnp.where(of.split == 0, shape.group + 2, shape.group)
    for start in range(0, (shape.group + 2) * quarter, 2 * LANES):
        index = block.thread() + start
        shift = quarter.bit_length() - 1
        vector, j = index >> shift, index & (quarter - 1)
        is_there = vector < vectors
        is_key, is_value = vector == shape.group, vector == shape.group + 1
        of_query = of.head * shape.group + vector
        stored = jnp.where(is_key, shape.heads, shape.heads + shape.kv_heads) + of.head
        of_all = jnp.where(is_key | is_value, stored, of_query)
        place = of.sequence * (shape.projected // 2) + of_all * (shape.size // 2)
        turned = shape.rotated // 4  # lanes
        is_turned = j < turned
        words = jnp.where(is_turned, j, j + turned), j + jnp.where(is_turned, turned, quarter)
        places = [jnp.where(is_there, place + word, -1) for word in words]
        turn = of.sequence * (shape.rotated // 2) + 2 * j
        turn = jnp.where(is_there & is_turned, turn, -1)
        cos, sin = (
            [lax.bitcast_convert_type(one, jnp.float32) for one in memory.load(table, turn, 2)]
            for table in refs.rope
        )
        scales = _scales_of_heads(block, layer, is_key, is_there, words)
        a, b = exchange.take(refs.words, exchange_number, places)
        x, y = (a, b) if scales is None else _normed(a, b, scales, shape.size, eps)
        (a0, a1), (b0, b1) = lane.unpack(x), lane.unpack(y)
        low = lane.pack(a0 * cos[0] - b0 * sin[0], a1 * cos[1] - b1 * sin[1])
        high = lane.pack(b0 * cos[0] + a0 * sin[0], b1 * cos[1] + a1 * sin[1])
        low, high = jnp.where(is_turned, low, x), jnp.where(is_turned, high, y)
        low, high = jnp.where(is_value, a, low), jnp.where(is_value, b, high)
        row = vector * (shape.size // 2 + 4)
        for at, word in zip(words, (low, high), strict=True):
            memory.scatter(smem["q"], jnp.where(is_there, row + at, -1), word)
            for cache, is_its in ((refs.k, is_key), (refs.v, is_value)):
                slot = cache.at[layer, of.stored, of.length, of.head]
                memory.store(slot, jnp.where(is_its & is_there, at, -1), word)


def _scales_of_heads(block: Block, layer, is_key, is_there, places):
    """The scales of the norm of a lane's features, or None if there is no such norm."""
    if block.refs.head_scales is None:
        return None
    of_query, of_key = (
        [memory.load(scale.at[layer], jnp.where(is_there, place, -1))[0] for place in places]
        for scale in block.refs.head_scales
    )
    return [jnp.where(is_key, k, q) for q, k in zip(of_query, of_key, strict=True)]


def _normed(a, b, scales, size: int, eps: float):
    """Two words of a head whose others lie in the neighbouring lanes, behind its RMS norm."""
    halves = lane.unpack(a), lane.unpack(b)
    (a0, a1), (b0, b1) = halves
    squares = lane.sum_of(a0 * a0 + a1 * a1 + b0 * b0 + b1 * b1, size // 4)
    factor = lax.rsqrt(squares / size + eps)
    return [
        lane.pack(low * factor * by[0], high * factor * by[1])
        for (low, high), by in zip(halves, map(lane.unpack, scales), strict=True)
    ]


def put_state(block: Block, state: attention.State) -> None:
    """Stores what each warp knows."""
    shape, smem, thread = block.shape, block.smem, block.thread()
    key_tiles = 512 // shape.size
    warp, head, quad = thread >> 5, (thread >> 2) & 7, thread & 3
    tile, features = warp & (key_tiles - 1), (warp >> (key_tiles.bit_length() - 1)) * 64
    is_there = head < shape.group
    row = tile * shape.group + head
    for i, value in enumerate(state.values):
        feature = features + 8 * (i // 2) + 2 * quad + i % 2
        memory.scatter(smem["values"], jnp.where(is_there, row * shape.size + feature, -1), value)
    total = lane.sum_of(state.total, 4)
    is_one = is_there & (quad == 0) & (features == 0)
    for i, value in enumerate((state.top, total)):
        memory.scatter(smem["tops"], jnp.where(is_one, 2 * row + i, -1), value)


def post_split(block: Block, exchange_number, of: Unit) -> None:
    """Merges what the warps have, and posts it.

    Of each key/value head of a sequence, the exchange has the values of all splits but the first,
    `[splits - 1, group, size]`, and then their tops and totals, `[splits - 1, group, 2]`.
    """
    shape = block.shape
    size, before = shape.size, (of.split - 1) * shape.group
    values = _first_word(block, of)
    tops = values + (shape.key_splits - 1) * shape.group * size
    for start in range(0, shape.group * size, 2 * LANES):
        index = block.thread() + start
        is_there = index < shape.group * size
        own, feature = index >> (size.bit_length() - 1), index & (size - 1)
        row, states = jnp.where(is_there, own, 0), 512 // size
        least = lane.full(attention.LEAST, jnp.float32)
        top, total, factors = _merged(block, row, states, least)
        value = _sum_of_states(block, factors, row * size + feature)
        place = jnp.where(is_there, values + before * size + index, -1)
        of_top = jnp.where(is_there & (feature < 2), tops + 2 * (before + own) + feature, -1)
        for places, number in ((place, value), (of_top, jnp.where(feature == 0, top, total))):
            bits = lax.bitcast_convert_type(number, jnp.int32)
            exchange.post(block.refs.words, exchange_number, places, bits)


def take_splits(block: Block, exchange_number, of: Unit) -> None:
    """Takes what the other splits have, as further rows of what this block's warps have."""
    shape, smem = block.shape, block.smem
    first, many = _first_word(block, of), shape.merged_words
    own = 512 // shape.size * shape.group  # rows
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
    """Where the words of the splits of a key/value head begin in their exchange."""
    return (of.sequence * block.shape.kv_heads + of.head) * block.shape.merged_words


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
    pairs = [number + 32 * i for i in range(shape.size // 64)]
    key, value = ([memory.gather(smem["q"], r * words + pair) for pair in pairs]
                  for r in (shape.group, shape.group + 1))  # fmt: skip
    score = lane.full(0.0, jnp.float32)
    for pair, word in zip(pairs, key, strict=True):
        q, k = lane.unpack(memory.gather(smem["q"], mine * words + pair)), lane.unpack(word)
        score += q[0] * k[0] + q[1] * k[1]
    score = lane.sum_of(score) * (LOG2_E / shape.size**0.5)
    top, total, factors = _merged(block, mine, states, score)
    factor = lane.exp2(score - top)
    total += factor
    for pair, word in zip(pairs, value, strict=True):
        at = mine * shape.size + 2 * pair
        sums = [
            factor * half + _sum_of_states(block, factors, at + i)
            for i, half in enumerate(lane.unpack(word))
        ]
        head = of.head * shape.group + own
        place = of.sequence * (shape.attended // 2) + head * (shape.size // 2)
        places = jnp.where(is_there, place + pair, -1)
        packed = lane.pack(sums[0] / total, sums[1] / total)
        exchange.post(block.refs.words, exchange_number, places, packed)

"""The feed-forward block behind the gates: only rows of neurons that are open for some token.

The block that has a row's gate also multiplies its row of `up`, so that no exchange lies between,
and posts its activations. Meanwhile all blocks learn from `masks` which rows are open, and ask for
their 16 columns of these rows of `down`.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.decode.one_launch import (
    activation,
    exchange,
    lane,
    memory,
    open_lists,
    products,
    stream,
)
from pallas_kernels.hopper.decode.one_launch.block import Block, OfRows
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WARP
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import (
    BLOCK_WARPS,
    STAGE_WORDS,
    TOKENS,
    WORDS,
)
from pallas_kernels.hopper.decode.one_launch.shape import GATE
from pallas_kernels.hopper.decode.one_launch.tokens import Tokens

_AT_ONCE = 2 * LANES  # rows of `down` that are added together, one a lane
_LOADED = 2  # stages of two rows that a lane loads at once


def clear(hidden_ref, thread) -> None:
    """Sets the activations of all rows and tokens to zero."""
    for start in range(0, hidden_ref.shape[0] * hidden_ref.shape[1], 2 * LANES):
        memory.scatter(hidden_ref, thread + start, lane.full(0))


def keep_masks(block: Block, exchange_number, factor, scales: OfRows, biases: OfRows):
    """`product`'s functions that keep the gates and post which rows are open, a bit for each.

    The warps of a warpgroup share the tokens, so a group has a mask of each (`Shape.mask_warps`).
    """
    batch, smem, rectifier = block.shape.batch, block.smem, block.shape.rectifier
    tiles, warps = block.shape.tiles, block.shape.mask_warps

    def prepare(row):
        own = row + (lane.numbers() & (ROWS - 1))
        return stream.scales_at(*scales.activated, own), stream.bias_at(*biases.activated, own)

    def finish(row, part, prepared):
        i = row // ROWS - block.first[GATE]

        @pl.when(block.wg == part)  # of two, in turns
        def _():
            number = lane.numbers()
            own, first = number & (ROWS - 1), number >> 4
            (scale,), bias = prepared

            def of_token(j, is_open):
                lane.keep_loop()
                token = first + 2 * warps * j
                is_there = (token < batch) & (first < 2 * warps)
                token = jnp.where(is_there, token, 0)
                total = products.sum_of_warps(smem["parts"], part, tiles, own, token)
                total *= factor(token) * scale
                total = stream.with_bias_of(own, total, bias)
                # A gate of -inf is 0, but times an up of inf that is NaN.
                is_active = activation.is_active(total, rectifier) | (total == -jnp.inf)
                is_active &= is_there if block.live is None else is_there & (row + own < block.live)
                gate = activation.rounded(activation.activated(total, rectifier))
                place = (i * ROWS + own) * tiles * TOKENS + token
                memory.scatter(smem["gates"], jnp.where(is_there, place, -1), gate)
                return is_open | jnp.where(is_active, 1, 0)

            turns = pl.cdiv(block.tokens, 2 * warps)
            bits = lane.ballot(lax.fori_loop(0, turns, of_token, lane.full(0)))
            mask = (bits | (bits >> ROWS)) & 0xFFFF
            warp = number >> 5
            is_one = (number & (WARP - 1) == 0) & (warp < warps)
            memory.scatter(smem["own_masks"], jnp.where(is_one, i * warps + warp, -1), mask)
            place = jnp.where(is_one, row // ROWS * warps + warp, -1)
            exchange.post(block.refs.words, exchange_number, place, mask)

    return prepare, finish


def add(
    block, layer, tokens: Tokens, exchange_number, factor, scales: OfRows, biases: OfRows
) -> None:
    """Adds the products of the open rows; exchange `exchange_number + 2` gets the stream."""
    own = _list_own(block)
    up = None if block.refs.up is None else block.refs.up.at[layer]
    _post_hidden(block, up, tokens, exchange_number + 1, own, factor, (scales.up, biases.up))
    found = _list_all(block, exchange_number)
    columns = block.shape.width // ROWS
    blocks = block.shape.blocks
    for start in range(0, columns, blocks):
        number = lax.axis_index("block") + start

        @pl.when(number < columns)
        def _(number=number):
            prepare, finish = stream.publish(
                block, exchange_number + 2, block.shape.width, bias=biases.down,
                stream=exchange_number - 1,
            )  # fmt: skip
            before = prepare(number * ROWS)
            sums = _sum_of_rows(block, layer, exchange_number + 1, number, found)
            products.put(block.smem["parts"], jnp.int32(0), sums, block.wg)
            block.meet()
            finish(number * ROWS, jnp.int32(0), before)
            block.meet()


def _list_own(block):
    """Lists this block's open rows in `own_rows`, and returns how many there are."""
    shape, smem = block.shape, block.smem
    count = block.many[GATE]
    masks = []
    for i in range(shape.most_gates):
        mask = lane.full(0)
        for warp in range(shape.mask_warps):
            place = jnp.where(i < count, lane.full(i * shape.mask_warps + warp), -1)
            mask |= memory.gather(smem["own_masks"], place)
        masks.append(mask)
    for start in range(0, shape.most_gates * ROWS, 2 * LANES):
        index = block.thread() + start
        group, bit = index >> 4, index & (ROWS - 1)
        at, mine = lane.full(0), lane.full(0)
        for i, mask in enumerate(masks):
            at += jnp.where(i < group, lane.popcount(mask), 0)
            mine = jnp.where(i == group, mask, mine)
        at += lane.popcount(mine & ((lane.full(1) << bit) - 1))
        is_open = ((mine >> bit) & 1) != 0
        memory.scatter(smem["own_rows"], jnp.where(is_open, at, -1), index)
    total = lane.full(0)
    for mask in masks:
        total += lane.popcount(mask)
    memory.scatter(smem["counts"], jnp.where(block.thread() == 0, BLOCK_WARPS, -1), total)
    block.meet()
    return memory.number_at(smem["counts"], BLOCK_WARPS)


def _post_hidden(block, up, tokens, exchange_number, own, factor, of_rows) -> None:
    """Multiplies the block's open rows of `up`, 16 at once, and posts their activations; `of_rows`
    are the scales and biases of `up`."""
    shape, smem, parts = block.shape, block.smem, block.smem["parts"]
    scales, bias = of_rows
    pairs = 1 << (4 * shape.tiles - 1).bit_length()  # of tokens, lanes of a row

    @pl.loop(0, pl.cdiv(own, ROWS))
    def _(i):
        part = lax.rem(i, 2)
        if up is not None:
            sums = _times_up(block, up, tokens, i * ROWS, own)
            products.put(parts, part, sums, block.wg)
            block.meet()

        @pl.when(block.wg < -(-ROWS * pairs // LANES))
        def _():
            thread = block.thread()
            row, pair = thread >> (pairs.bit_length() - 1), thread & (pairs - 1)
            is_there = (row < ROWS) & (i * ROWS + row < own) & (pair < shape.open_words)
            local = memory.gather(smem["own_rows"], jnp.where(is_there, i * ROWS + row, -1))
            of_all = block.first[GATE] * ROWS + local
            of_row = jnp.where(is_there, of_all, -1)
            (scale,), of_bias = stream.scales_at(scales, of_row), stream.bias_at(bias, of_row)
            hidden = []
            for token in (2 * pair, 2 * pair + 1):
                has = is_there & (token < shape.batch)
                place = local * shape.tiles * TOKENS + token
                gate = memory.gather(smem["gates"], jnp.where(has, place, -1))
                if up is not None:
                    own_row, own_token = (jnp.where(has, one, 0) for one in (row, token))
                    u = products.sum_of_warps(parts, part, shape.tiles, own_row, own_token)
                    u *= factor(own_token) * scale
                    u = stream.with_bias_of(of_all, u, of_bias)
                    gate *= activation.linear(u, shape.rectifier)
                hidden.append(gate)
            place = jnp.where(is_there, of_all * shape.open_words + pair, -1)
            exchange.post(block.refs.words, exchange_number, place, lane.pack(*hidden))


def _times_up(block, up, tokens: Tokens, first, own) -> list[jax.Array]:
    """Sums of each warp: of up to 16 open rows of `up`, from the one numbered `first` on, times the
    tokens. Lanes load them as the product wants them."""
    shape, row_of_lane = block.shape, (lane.numbers() >> 2) & 7
    numbers = [first + row_of_lane + half for half in (0, 8)]
    rows = [memory.gather(block.smem["own_rows"], jnp.where(n < own, n, -1)) for n in numbers]
    stages, words = shape.stages(GATE), shape.words_of_row(GATE)
    first, distances = products.first_word(block.wg), products.distances(stages)
    left = None if words == stages * STAGE_WORDS else words - first
    rows = [
        jnp.where(n < own, (block.first[GATE] * ROWS + row) * words, 0) + first
        for n, row in zip(numbers, rows, strict=True)
    ]
    sums = products.zeros(shape.tiles)
    for begin in range(0, len(distances), _LOADED * WORDS):
        some = distances[begin : begin + _LOADED * WORDS]
        loaded = [
            memory.load_row(up, row, left, some, is_there=n < own)
            for n, row in zip(numbers, rows, strict=True)
        ]
        for start in range(0, len(some), WORDS):
            of_rows = [words[start:][:WORDS] for words in loaded]
            of_tokens = [words[begin + start :][:WORDS] for words in tokens]
            sums = products.add_words(of_rows, of_tokens, sums, dtype=up.dtype)
    return sums


def _list_all(block, exchange_number):
    """Lists the open rows of all blocks; returns how many there are."""
    shape, thread = block.shape, block.thread()
    places = open_lists.groups(shape.neurons, block.groups, thread)
    warps = shape.mask_warps
    of_warps = [
        jnp.where(place < 0, -1, place * warps + warp) for place in places for warp in range(warps)
    ]
    found = exchange.take(block.refs.words, exchange_number, of_warps)
    masks = [
        functools.reduce(jnp.bitwise_or, found[i : i + warps]) for i in range(0, len(found), warps)
    ]
    return open_lists.fill(block.smem, block.meet, thread, places, masks)


def _sum_of_rows(block, layer, exchange_number, columns, found):
    """Sums of each warp, of 16 columns of the open rows times their activations.

    If more rows are open than are listed, all are looked at. The rows of the next step are on their
    way while those of one are multiplied.
    """
    shape, smem, thread = block.shape, block.smem, block.thread()
    steps = pl.cdiv(open_lists.to_look_at(smem, found, block.groups), _AT_ONCE)
    down, of_row = block.refs.down.at[layer], shape.width // 2

    def request(i):
        """A lane's row in a step, or -1, and the columns of that row of `down`."""
        row = open_lists.row_at(smem, i * _AT_ONCE + thread, found, block.groups)
        places = [jnp.where(row >= 0, row * of_row + 8 * columns + half, -1) for half in (0, 4)]
        return row, *(word for place in places for word in memory.load(down, place, 4))

    def step(i, carry):
        sums, row, *words = carry
        following = request(i + 1)
        parts = range(shape.open_words)
        places = [jnp.where(row >= 0, row * shape.open_words + part, -1) for part in parts]
        hidden = exchange.take(block.refs.words, exchange_number, places)
        for half in (0, 4):
            memory.scatter_four(smem["columns"], 8 * thread + half, words[half : half + 4])
        for part, word in zip(parts, hidden, strict=True):
            memory.scatter(smem["hidden"], shape.hidden_words * thread + part, word)
        block.meet()
        sums = products.add_rows(smem["columns"], smem["hidden"], [*sums], block.wg)
        block.meet()
        return tuple(sums), *following

    start = tuple(products.zeros(shape.tiles)), *request(jnp.int32(0))
    return [*lax.fori_loop(0, steps, step, start)[0]]

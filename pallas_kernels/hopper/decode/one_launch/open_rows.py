"""The feed-forward block behind the gates: only rows of neurons that are open for some token.

The block that has a row's gate also multiplies its row of `up`, so that no exchange lies between,
and posts its activations. Meanwhile all blocks learn from `masks` which rows are open, and ask for
their 16 columns of these rows of `down`.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.decode.one_launch import (
    activation,
    exchange,
    lane,
    memory,
    products,
    stream,
)
from pallas_kernels.hopper.decode.one_launch.block import Block, OfRows
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WARP
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, TOKENS
from pallas_kernels.hopper.decode.one_launch.shape import GATE, LISTED

_AT_ONCE = 2 * LANES  # rows of `down` that are added together, one a lane
_LOADED = 4  # 16-byte parts of two rows that a lane loads at once


def clear(hidden_ref, thread) -> None:
    """Sets the activations of all rows and tokens to zero."""
    for start in range(0, 4 * _AT_ONCE, 2 * LANES):
        memory.scatter(hidden_ref, thread + start, lane.full(0))


def keep_masks(block: Block, exchange_number, factor, scales: OfRows, biases: OfRows):
    """`product`'s functions that keep the gates and post which rows are open, a bit for each.

    All warps of a warpgroup compute the same: a lane has half of the tokens of a row.
    """
    batch, smem, rectifier = block.shape.batch, block.smem, block.shape.rectifier
    half = -(-batch // 2)

    def prepare(row):
        own = row + (lane.numbers() & (ROWS - 1))
        return stream.scales_at(*scales.activated, own), stream.bias_at(*biases.activated, own)

    def finish(row, part, prepared):
        i = row // ROWS - block.first[GATE]

        @pl.when(block.wg == part)  # of two, in turns
        def _():
            number = lane.numbers() & (WARP - 1)
            own, first = number & (ROWS - 1), (number >> 4) * half
            (scale,), bias = prepared

            def of_token(j, is_open):
                lane.keep_loop()
                token = first + j
                is_there = token < batch
                place = jnp.where(is_there, own * TOKENS + token, -1)
                total = products.sum_of_warps(smem["parts"], part, place)
                total *= factor(jnp.where(is_there, token, 0)) * scale
                total = stream.with_bias_of(own, total, bias)
                # A gate of -inf is 0, but times an up of inf that is NaN.
                is_active = activation.is_active(total, rectifier) | (total == -jnp.inf)
                is_active &= is_there if block.live is None else is_there & (row + own < block.live)
                gate = activation.rounded(activation.activated(total, rectifier))
                is_first = is_there & (lane.numbers() < WARP)
                places = jnp.where(is_first, i * ROWS * TOKENS + place, -1)
                memory.scatter(smem["gates"], places, gate)
                return is_open | jnp.where(is_active, 1, 0)

            bits = lane.ballot(lax.fori_loop(0, pl.cdiv(block.tokens, 2), of_token, lane.full(0)))
            mask = (bits | (bits >> ROWS)) & 0xFFFF
            once = lane.numbers() == 0
            memory.scatter(smem["own_masks"], jnp.where(once, i, -1), mask)
            group = jnp.where(once, row // ROWS, -1)
            exchange.post(block.refs.words, exchange_number, group, mask)

    return prepare, finish


def add(block, layer, exchange_number, factor, scales: OfRows, biases: OfRows) -> None:
    """Adds the products of the open rows; exchange `exchange_number + 2` gets the stream."""
    own = _list_own(block)
    up = None if block.refs.up is None else block.refs.up.at[layer]
    _post_hidden(block, up, exchange_number + 1, own, factor, (scales.up, biases.up))
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
        places = jnp.where(i < count, lane.full(i), -1)
        masks.append(memory.gather(smem["own_masks"], places))
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


def _post_hidden(block, up, exchange_number, own, factor, of_rows) -> None:
    """Multiplies the block's open rows of `up`, 16 at once, and posts their activations; `of_rows`
    are the scales and biases of `up`."""
    shape, smem, parts = block.shape, block.smem, block.smem["parts"]
    scales, bias = of_rows

    @pl.loop(0, pl.cdiv(own, ROWS))
    def _(i):
        part = lax.rem(i, 2)
        if up is not None:
            sums = _times_up(block, up, i * ROWS, own)
            products.put(parts, part, sums, block.wg)
            block.meet()

        @pl.when(block.wg == 0)
        def _():
            number = lane.numbers()
            row, pair = number >> 2, number & 3
            is_there = (row < ROWS) & (i * ROWS + row < own) & (pair < shape.open_words)
            local = memory.gather(smem["own_rows"], jnp.where(is_there, i * ROWS + row, -1))
            of_all = block.first[GATE] * ROWS + local
            of_row = jnp.where(is_there, of_all, -1)
            (scale,), of_bias = stream.scales_at(scales, of_row), stream.bias_at(bias, of_row)
            hidden = []
            for token in (2 * pair, 2 * pair + 1):
                has = is_there & (token < shape.batch)
                gate = memory.gather(smem["gates"], jnp.where(has, local * TOKENS + token, -1))
                if up is not None:
                    at = jnp.where(has, row * TOKENS + token, -1)
                    u = products.sum_of_warps(parts, part, at)
                    u *= factor(jnp.where(has, token, 0)) * scale
                    u = stream.with_bias_of(of_all, u, of_bias)
                    gate *= activation.linear(u, shape.rectifier)
                hidden.append(gate)
            place = jnp.where(is_there, of_all * shape.open_words + pair, -1)
            exchange.post(block.refs.words, exchange_number, place, lane.pack(*hidden))


def _times_up(block, up, first, own):
    """Sums of each warp: of up to 16 open rows of `up`, from the one numbered `first` on, times the
    tokens. A warp takes 16 of each 128 words; its lanes load them as the product wants them.
    """
    shape, smem, lanes = block.shape, block.smem, lane.numbers()
    quad, token = lanes & 3, jnp.minimum((lanes >> 2) & 7, shape.batch - 1)
    numbers = [first + ((lanes >> 2) & 7) + half for half in (0, 8)]
    rows = [memory.gather(smem["own_rows"], jnp.where(n < own, n, -1)) for n in numbers]
    rows = [block.first[GATE] * ROWS + row for row in rows]
    chunks = shape.words_of_row(GATE) // 4  # of 16 bytes

    def add(start, sums):
        """Of up to `_LOADED` times 128 words."""
        columns = [start + 32 * i + 4 * (block.thread() >> 5) + quad for i in range(_LOADED)]
        loaded = [
            memory.load(up, jnp.where((n < own) & (c < chunks), 4 * (row * chunks + c), -1), 4)
            for c in columns
            for n, row in zip(numbers, rows, strict=True)
        ]
        for i, c in enumerate(columns):
            x = memory.gather_four(
                smem["x"], token * shape.row_words + 4 * jnp.minimum(c, chunks - 1)
            )
            rows_of_warp = loaded[2 * i] + loaded[2 * i + 1]
            sums = products.add_words(rows_of_warp, x, sums, dtype=up.dtype)
        return sums

    steps = pl.cdiv(chunks, 32 * _LOADED)
    return lax.fori_loop(0, steps, lambda i, sums: add(i * 32 * _LOADED, sums), products.zeros())


def _list_all(block, exchange_number):
    """Lists the open rows of all blocks; returns how many there are."""
    shape, smem, thread = block.shape, block.smem, block.thread()
    starts = range(0, shape.neurons // ROWS, 2 * LANES)
    places = [jnp.where(thread + start < block.groups, thread + start, -1) for start in starts]
    masks = exchange.take(block.refs.words, exchange_number, places)
    own = lane.full(0)
    for place, mask in zip(places, masks, strict=True):
        memory.scatter(smem["masks"], place, mask)
        own += lane.popcount(mask)
    up_to = lane.sum_up_to(own)
    warp = thread >> 5
    counts = smem["counts"]
    memory.scatter(counts, jnp.where(thread & 31 == 31, warp, -1), up_to)
    block.meet()
    at = up_to - own
    for i in range(BLOCK_WARPS):
        at += jnp.where(i < warp, memory.gather(counts, lane.full(i)), 0)
    for place, mask in zip(places, masks, strict=True):

        def list_bits(i, at, place=place, mask=mask):
            lane.keep_loop()
            for bit in range(4):
                is_open = (mask >> (4 * i + bit)) & 1
                is_listed = (is_open != 0) & (at < LISTED)
                row = place * ROWS + 4 * i + bit
                memory.scatter(smem["listed"], jnp.where(is_listed, at, -1), row)
                at += is_open
            return at

        at = lax.fori_loop(0, ROWS // 4, list_bits, at)
    block.meet()
    return sum(memory.number_at(counts, i) for i in range(BLOCK_WARPS))


def _sum_of_rows(block, layer, exchange_number, columns, found):
    """Sums of each warp, of 16 columns of the open rows times their activations.

    If more rows are open than are listed, all are looked at. The rows of the next step are on their
    way while those of one are multiplied.
    """
    shape, smem, thread = block.shape, block.smem, block.thread()
    is_listed = found <= LISTED
    steps = pl.cdiv(jnp.where(is_listed, found, shape.neurons), _AT_ONCE)
    down, of_row = block.refs.down.at[layer], shape.width // 2

    def request(i):
        """A lane's row in a step, or -1, and the columns of that row of `down`."""
        number = i * _AT_ONCE + thread
        listed = memory.gather(smem["listed"], jnp.minimum(number, LISTED - 1))
        mask = memory.gather(smem["masks"], jnp.where(number < shape.neurons, number >> 4, -1))
        is_open = jnp.where(is_listed, number < found, ((mask >> (number & 15)) & 1) != 0)
        row = jnp.where(is_open, jnp.where(is_listed, listed, number), -1)
        places = [jnp.where(is_open, row * of_row + 8 * columns + half, -1) for half in (0, 4)]
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
            memory.scatter(smem["hidden"], 4 * thread + part, word)
        block.meet()
        sums = products.add_rows(smem["columns"], smem["hidden"], sums, block.wg)
        block.meet()
        return sums, *following

    start = products.zeros(), *request(jnp.int32(0))
    return lax.fori_loop(0, steps, step, start)[0]

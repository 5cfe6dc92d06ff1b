"""The residual stream: products with it, what they post, and how it comes to each thread block."""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import exchange, lane, memory, products
from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.norms import (
    Norm,
    layer_normed,
    put_of_warps,
    scaled,
    sum_of_squares,
)
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, TOKENS
from pallas_kernels.quantised import LARGEST, TINY


def product(block: Block, which: int, number, functions, matrices: int = 1):
    """Multiplies this block's rows.

    Args:
      block: the block.
      which: of `Shape.shares`.
      number: of the next stage; the result is that of the one after the product's.
      functions: for each group of rows, `prepare(row)` is called before its product, and
        `finish(row, part, prepared)` behind it, where `part` is that of the first matrix.
      matrices: how many have such rows.
    """
    prepare, finish = functions
    shape, ring = block.shape, block.rings[block.shape.itemsize(which)]
    stages = shape.stages(which)
    block.meet()  # the tokens are in shared memory
    tokens = [
        products.tokens_of_stage(
            block.smem["x"], s, block.wg, batch=shape.batch, words=shape.words_of_row(which)
        )
        for s in range(stages)
    ]

    def group(i, number):
        row = (block.first[which] + i) * ROWS
        prepared = prepare(row)
        first = lax.rem(i, 2) * matrices
        for matrix in range(matrices):
            sums = products.zeros()
            for stage in range(stages):
                slot = lax.rem(number + stage, shape.slots)
                plgpu.barrier_wait(block.full.at[slot])
                sums = products.add_product(ring.at[slot], tokens[stage], sums, block.wg)
                plgpu.barrier_arrive(block.empty.at[slot])
            products.put(block.smem["parts"], first + matrix, sums, block.wg)
            number += stages
        block.meet()
        finish(row, first, prepared)
        return number

    number = lax.fori_loop(0, block.many[which], group, number)
    block.meet()  # nobody reads the tokens any more
    return number


def publish(
    block: Block,
    exchange_number,
    features: int,
    *,
    factor=lambda token: 1.0,
    scales=None,
    bias=None,
    stream=None,
):
    """`product`'s functions that post the sums of rows: a lane has two rows of a token.

    Args:
      block: the block.
      exchange_number: where they are posted.
      features: of a token there.
      factor: a function of tokens whose result the sums are multiplied with (`factor_of`).
      scales: float32 GMEM `[features]`, those of the rows of 8-bit floats; or None.
      bias: GMEM `[features]`, what is added to them; or None.
      stream: the exchange that has what they are added to, which the block has taken before.
    """
    words, parts = block.refs.words, block.smem["parts"]

    def prepare(row):
        pair = pair_of(block, row, features)
        of_row = jnp.where(pair < 0, -1, row + 2 * (lane.numbers() & 7))
        before = lane.full(0) if stream is None else exchange.read(words, stream, pair)
        return scales_at(scales, of_row, 2), bias_at(bias, of_row), before

    def finish(row, part, prepared):
        @pl.when(block.wg == 0)
        def _():
            of_rows, of_bias, before = prepared
            number, place = lane.numbers(), pair_of(block, row, features)
            sums = [
                products.sum_of_warps(parts, part, where_pair(number, place, j)) for j in (0, 1)
            ]
            of_token = factor(jnp.where(place < 0, 0, number >> 3))
            sums = [one * of_token * by for one, by in zip(sums, of_rows, strict=True)]
            sums = with_bias(sums, of_bias)
            if stream is not None:
                sums = added(block, sums, before)
            exchange.post(words, exchange_number, place, lane.pack(*sums))

    return prepare, finish


def added(block: Block, sums, before) -> list[jax.Array]:
    """The two numbers of a word of the stream with what a block adds to them."""
    scale = block.shape.residual_scale
    return [x + scale * y for x, y in zip(lane.unpack(before), sums, strict=True)]


def scales_at(scales, rows, count: int = 1) -> list:
    """The float32 `scales` of `count` rows from each lane's on; 1 if there are none."""
    if scales is None:
        return count * [1.0]
    return [lax.bitcast_convert_type(one, jnp.float32) for one in memory.load(scales, rows, count)]


def bias_at(bias, rows):
    """The word of a bias, bfloat16, that has each lane's row and its neighbour; or None."""
    return None if bias is None else memory.load(bias, rows >> 1)[0]  # negative rows stay so


def with_bias(sums, word) -> list:
    """The sums of the two rows of a word of `bias_at` with what it has."""
    if word is None:
        return sums
    return [one + b for one, b in zip(sums, lane.unpack(word), strict=True)]


def with_bias_of(row, total, word):
    """The sum of a row with what its word of `bias_at` has."""
    first, second = with_bias([total, total], word)
    return jnp.where((row & 1) == 0, first, second)


def pair_of(block: Block, row, features: int):
    """Where a lane's pair of the 16 rows from `row` on is among tokens' words; -1: it has none."""
    number = lane.numbers()
    token, pair = number >> 3, number & 7
    place = token * (features // 2) + row // 2 + pair
    return jnp.where(token < block.shape.batch, place, -1)


def where_pair(number, place, which: int):
    """Where the sum of the first or second row of a lane's pair is in a part."""
    token, pair = number >> 3, number & 7
    return jnp.where(place < 0, -1, (2 * pair + which) * TOKENS + token)


def receive(
    block: Block, exchange_number, features: int, norm: Norm | None = None, *, rounds: bool
) -> None:
    """Takes tokens into shared memory.

    Args:
      block: the block.
      exchange_number: what has them.
      features: of a token.
      norm: None, a layer norm, or an RMS norm: then they get its scale, and their sums of squares
        go there, too, for `factor_of`.
      rounds: whether they become 8-bit floats, with a scale for each.
    """
    shape = block.shape
    places = _places(block, features)
    scale, bias, eps = norm or (None, None, 0.0)
    scales, biases = (None if of is None else _words(of, places) for of in (scale, bias))

    def take(first):
        tokens = [first + i for i in range(shape.tokens_at_once)]
        wanted = [
            jnp.where((place < 0) | (token >= shape.batch), -1, token * (features // 2) + place)
            for token in tokens
            for place in places
        ]
        words = exchange.take(block.refs.words, exchange_number, wanted, 2)
        each = [words[i * 2 * len(places) : (i + 1) * 2 * len(places)] for i in range(len(tokens))]
        if biases is not None:
            each = layer_normed(block, places, tokens, each, scales, biases, eps)
        elif scales is not None:
            squares = [sum_of_squares(mine) for mine in each]
            put_of_warps(block, "squares", tokens, lane.sums_of(squares))
            each = [scaled(mine, scales) for mine in each]
        _put(block, places, tokens, each, rounds=rounds)

    block.meet()  # nobody reads what was there
    _for_tokens(block, take)
    if rounds:
        _round(block, places)


def _for_tokens(block: Block, function) -> None:
    """Calls a function of the first of `tokens_at_once` tokens, for all of them."""
    at_once = block.shape.tokens_at_once
    if at_once == block.shape.batch:
        function(0)
        return

    @pl.loop(0, pl.cdiv(block.tokens, at_once))
    def _(i):
        lane.keep_loop()
        function(i * at_once)


def _places(block: Block, features: int) -> list[jax.Array]:
    """The first of each two neighbouring words of a token that a lane has; -1 past the last."""
    starts = range(0, features // 2, 4 * LANES)
    places = [2 * block.thread() + start for start in starts]
    return [jnp.where(place < features // 2, place, -1) for place in places]


def _words(ref, places) -> list[jax.Array]:
    return [word for place in places for word in memory.load(ref, place, 2)]


def _put(block: Block, places, tokens, each, *, rounds: bool) -> None:
    """Stores the words of each of some tokens, and what `_round` needs of them."""
    for token, words in zip(tokens, each, strict=True):
        for i, word in enumerate(words):
            place = places[i // 2]
            is_there = (place >= 0) & (token < block.shape.batch)
            place = jnp.where(is_there, token * block.shape.row_words + place + i % 2, -1)
            memory.scatter(block.smem["x"], place, word)
    if rounds:
        put_of_warps(block, "largest", tokens, lane.largest_of(each))


def _round(block: Block, places) -> None:
    """Makes 8-bit floats of the tokens in shared memory, with a scale for each; see
    `quantised.rounded`."""
    smem, shape, thread = block.smem, block.shape, block.thread()
    block.meet()  # all of them are there
    scale = _scale_of(smem["largest"], jnp.minimum(thread, TOKENS - 1))
    for i, value in enumerate((scale, 1 / scale)):
        place = jnp.where(thread < TOKENS, i * TOKENS + thread, -1)
        memory.scatter(smem["token_scales"], place, value)
    block.meet()

    @pl.loop(0, block.tokens)
    def _(token):
        lane.keep_loop()
        factor = memory.gather(smem["token_scales"], lane.full(TOKENS) + token)
        row, fours = token * shape.row_words, []
        for place in places:
            words = memory.gather_each(smem["x"], row + jnp.maximum(place, 0), 2, 1)
            halves = [half for word in words for half in lane.unpack(word)]
            fours.append(lane.pack_four([half * factor for half in halves]))
        block.meet()  # nobody reads what lies where these go
        for place, four in zip(places, fours, strict=True):
            memory.scatter(smem["x"], jnp.where(place < 0, -1, row + (place >> 1)), four)


def _scale_of(largest_ref, token) -> jax.Array:
    """The scale of each lane's token, from the bits of the largest magnitude that warps have."""
    of_warps = memory.gather_each(largest_ref, token * BLOCK_WARPS, BLOCK_WARPS, 1)
    top = functools.reduce(jnp.maximum, of_warps)  # bits are ordered as magnitudes are, NaN last
    largest = lax.bitcast_convert_type(top, jnp.float32)
    scale = jnp.where(largest > 0, jnp.maximum(largest * (1 / LARGEST), TINY), 1.0)
    return jnp.where(largest < jnp.inf, scale, jnp.nan)


def first_stream(block: Block, *, rounds: bool) -> None:
    """Puts the tokens in front of the first layer into shared memory."""
    shape, thread = block.shape, block.thread()
    places = _places(block, shape.width)

    def load(first):
        tokens = [first + i for i in range(shape.tokens_at_once)]
        each = []
        for token in tokens:
            known = jnp.minimum(token, shape.batch - 1)
            each.append(_words(block.refs.scaled.at[known], places))
            if block.refs.squares is None:
                continue
            (total,) = memory.load(block.refs.squares.at[known], jnp.where(thread == 0, 0, -1))
            # A load takes the first of eight sums; the others are of no warp.
            place = jnp.where(thread < BLOCK_WARPS, token * BLOCK_WARPS + thread, -1)
            total = lax.bitcast_convert_type(total, jnp.float32)
            memory.scatter(block.smem["squares"], place, total)
        _put(block, places, tokens, each, rounds=rounds)

    _for_tokens(block, load)
    if rounds:
        _round(block, places)


def last_stream(block: Block, outs, exchange_number) -> None:
    """Stores the stream behind the last layer, which the block has taken; zeros for more tokens."""
    shape, thread = block.shape, block.thread()
    x, *in_front_of_norm = outs
    places = _places(block, shape.width)
    if in_front_of_norm:
        scales = _words(block.refs.scales[1].at[shape.layers - 1], places)
    block.meet()

    @pl.loop(0, x.shape[0])
    def _(token):
        is_there = token < shape.batch
        words = []
        for place in places:
            of_all = token * (shape.width // 2) + place
            known = is_there & (place >= 0)
            words += [
                exchange.read(block.refs.words, exchange_number, jnp.where(known, of_all + j, -1))
                for j in (0, 1)
            ]
        stored = [(x, words)]
        if in_front_of_norm:
            scaled_x, squares = in_front_of_norm
            stored.append((scaled_x, scaled(words, scales)))
        for out, values in stored:
            for i, value in enumerate(values):
                place = places[i // 2]
                memory.store(out.at[token], jnp.where(place < 0, -1, place + i % 2), value)
        if not in_front_of_norm:
            return
        place = jnp.where(thread < BLOCK_WARPS, thread, -1)
        mine = jnp.where(is_there & (place >= 0), token * BLOCK_WARPS + place, -1)
        total = memory.gather(block.smem["squares"], mine)
        memory.store(squares.at[token], place, lax.bitcast_convert_type(total, jnp.int32))

"""The residual stream: products with it, and what they post."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import exchange, lane, memory, products
from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import WORDS
from pallas_kernels.hopper.decode.one_launch.tokens import Tokens


def product(block: Block, which: int, tokens: Tokens, number, functions, matrices: int = 1):
    """Multiplies this block's rows.

    Args:
      block: the block.
      which: of `Shape.shares`.
      tokens: what they are multiplied with.
      number: of the next stage; the result is that of the one after the product's.
      functions: for each group of rows, `prepare(row)` is called before its product, and
        `finish(row, part, prepared)` behind it, where `part` is that of the first matrix.
      matrices: how many have such rows.
    """
    prepare, finish = functions
    shape, ring = block.shape, block.rings[block.shape.itemsize(which)]
    stages = shape.stages(which)

    def group(i, number):
        row = (block.first[which] + i) * ROWS
        prepared = prepare(row)
        first = lax.rem(i, 2) * matrices
        for matrix in range(matrices):
            sums = products.zeros(shape.tiles)
            for stage in range(stages):
                slot = lax.rem(number + stage, shape.slots)
                of_stage = [words[stage * WORDS :][:WORDS] for words in tokens]
                plgpu.barrier_wait(block.full.at[slot])
                sums = products.add_product(ring.at[slot], of_stage, sums, block.wg)
                plgpu.barrier_arrive(block.empty.at[slot])
            products.put(block.smem["parts"], first + matrix, sums, block.wg)
            number += stages
        block.meet()
        finish(row, first, prepared)
        return number

    number = lax.fori_loop(0, block.many[which], group, number)
    block.meet()  # nobody reads the sums any more, of rows or of tokens
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
    words = block.refs.words

    def prepare(row):
        pair = pair_of(block, row, features)
        of_row = jnp.where(pair < 0, -1, row + 2 * (lane.numbers() & 7))
        before = lane.full(0) if stream is None else exchange.read(words, stream, pair)
        return scales_at(scales, of_row, 2), bias_at(bias, of_row), before

    def finish(row, part, prepared):
        @pl.when(has_pairs(block))
        def _():
            of_rows, of_bias, before = prepared
            place, of_token = pair_of(block, row, features), factor(pair_token(block))
            sums = [
                one * of_token * by
                for one, by in zip(sums_of_pair(block, part), of_rows, strict=True)
            ]
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
    if word is None:
        return total
    first, second = with_bias([total, total], word)
    return jnp.where((row & 1) == 0, first, second)


def has_pairs(block: Block):
    """Whether the warpgroup has pairs of rows: it has those of 16 tokens."""
    return block.wg < -(-block.shape.batch * ROWS // (2 * LANES))


def pair_of(block: Block, row, features: int):
    """Where a lane's pair of the 16 rows from `row` on is among tokens' words; -1: it has none."""
    token, pair = block.thread() >> 3, lane.numbers() & 7
    place = exchange.place_of(token, row // 2 + pair, features)
    return jnp.where(token < block.shape.batch, place, -1)


def pair_token(block: Block):
    """The token of a lane's pair; the last one if it has none."""
    return jnp.minimum(block.thread() >> 3, block.shape.batch - 1)


def sums_of_pair(block: Block, part) -> list[jax.Array]:
    """The sums of the two rows of a lane's pair; `part` as of `product`."""
    first, token = 2 * (lane.numbers() & 7), pair_token(block)
    return [
        products.sum_of_warps(block.smem["parts"], part, block.shape.tiles, first + j, token)
        for j in (0, 1)
    ]

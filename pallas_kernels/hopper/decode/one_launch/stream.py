"""The residual stream: products with it, what they post, and how it comes to each thread block."""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import exchange, lane, memory, products
from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, TOKENS, stages_of


def product(block: Block, which: int, features: int, number, functions, matrices: int = 1):
    """Multiplies this block's rows.

    Args:
      block: the block.
      which: of `Shape.shares`.
      features: of a row.
      number: of the next stage; the result is that of the one after the product's.
      functions: for each group of rows, `prepare(row)` is called before its product, and
        `finish(row, part, prepared)` behind it, where `part` is that of the first matrix.
      matrices: how many have such rows.
    """
    prepare, finish = functions
    stages = stages_of(features)
    block.meet()  # the tokens are in shared memory
    tokens = [
        products.tokens_of_stage(
            block.smem["x"], s, block.wg, batch=block.shape.batch, features=features
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
                slot = lax.rem(number + stage, block.shape.slots)
                plgpu.barrier_wait(block.full.at[slot])
                sums = products.add_product(block.ring.at[slot], tokens[stage], sums, block.wg)
                plgpu.barrier_arrive(block.empty.at[slot])
            products.put(block.smem["parts"], first + matrix, sums, block.wg)
            number += stages
        block.meet()
        finish(row, first, prepared)
        return number

    number = lax.fori_loop(0, block.many[which], group, number)
    block.meet()  # nobody reads the tokens any more
    return number


def publish(block: Block, exchange_number, features: int, *, inverse=None, bias=None, stream=None):
    """`product`'s functions that post the sums of rows: a lane has two rows of a token.

    Args:
      block: the block.
      exchange_number: where they are posted.
      features: of a token there.
      inverse: a function of tokens whose result the sums are multiplied with.
      bias: GMEM `[features]`, what is added to them; or None.
      stream: the exchange that has what they are added to, which the block has taken before.
    """
    words, parts = block.refs.words, block.smem["parts"]

    def prepare(row):
        pair, found = pair_of(block, row, features), []
        if bias is not None:
            of_row = jnp.where(pair < 0, -1, row // 2 + (lane.numbers() & 7))
            found += memory.load(bias, of_row)
        if stream is not None:
            found.append(exchange.read(words, stream, pair))
        return found

    def finish(row, part, added):
        @pl.when(block.wg == 0)
        def _():
            number, place = lane.numbers(), pair_of(block, row, features)
            low, high = (
                products.sum_of_warps(parts, part, where_pair(number, place, j)) for j in (0, 1)
            )
            if inverse is not None:
                factor = inverse(jnp.where(place < 0, 0, number >> 3))
                low, high = low * factor, high * factor
            for word in added:
                more = lane.unpack(word)
                low, high = low + more[0], high + more[1]
            exchange.post(words, exchange_number, place, lane.pack(low, high))

    return prepare, finish


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


def receive(block: Block, exchange_number, features: int, scale=None) -> None:
    """Takes tokens into shared memory; with a scale, also the squares that their norm needs."""
    shape, thread = block.shape, block.thread()
    pairs = [thread + 2 * LANES * i for i in range(-(-features // 2 // (2 * LANES)))]
    scales = [None if scale is None else scale(only_pair(pair, features)) for pair in pairs]
    block.meet()  # nobody reads what was there
    squares = []
    # Words of the first token alone are waited for: whoever posts them posts the others beside.
    # Those of four tokens fit into registers.
    for first in (0, *range(1, shape.batch, 4)):
        tokens = range(first, min(first + 4, shape.batch) if first else 1)
        places = [
            jnp.where(pair < features // 2, token * (features // 2) + pair, -1)
            for token in tokens
            for pair in pairs
        ]
        words = exchange.take(block.refs.words, exchange_number, places)
        for i, token in enumerate(tokens):
            mine = words[i * len(pairs) : (i + 1) * len(pairs)]
            squares.append(put_token(block, token, pairs, mine, scales, features))
    if scale is not None:
        for token, total in enumerate(lane.sums_of(squares)):
            places = jnp.where(thread & 31 == 0, token * BLOCK_WARPS + (thread >> 5), -1)
            memory.scatter(block.smem["squares"], places, total)


def put_token(block: Block, token: int, pairs, words, scales, features: int) -> jax.Array:
    """Stores a token, scaled for its norm; returns the sum of a lane's squares if there is one."""
    squares = lane.full(0.0, jnp.float32)
    row = token * block.shape.row_words
    for pair, word, scale in zip(pairs, words, scales, strict=True):
        if scale is not None:
            low, high = lane.unpack(word)
            squares += low * low + high * high
            by = lane.unpack(scale)
            word = lane.pack(low * by[0], high * by[1])
        places = jnp.where(pair < features // 2, row + pair, -1)
        memory.scatter(block.smem["x"], places, word)
    return squares


def only_pair(pair, features: int):
    """The pair, or -1 past the last."""
    return jnp.where(pair < features // 2, pair, -1)


def scale_of(scales, layer):
    """A function of pairs of features that loads a layer's scales."""
    return lambda pair: memory.load(scales.at[layer], pair)[0]


def inverse_rms(block: Block, token, eps: float):
    """Of each lane's token."""
    total = memory.gather(block.smem["squares"], token * BLOCK_WARPS)
    for warp in range(1, BLOCK_WARPS):
        total += memory.gather(block.smem["squares"], token * BLOCK_WARPS + warp)
    return lax.rsqrt(total / block.shape.width + eps)


def first_stream(block: Block) -> None:
    """Puts the tokens in front of the first layer into shared memory."""
    shape, thread = block.shape, block.thread()
    features = shape.width // 2
    for token in range(shape.batch):
        for i in range(-(-features // (2 * LANES))):
            pair = thread + 2 * LANES * i
            word = memory.load(block.refs.scaled.at[token], only_pair(pair, shape.width))[0]
            places = jnp.where(pair < features, token * shape.row_words + pair, -1)
            memory.scatter(block.smem["x"], places, word)
        places = jnp.where(thread == 0, 0, -1)
        total = lax.bitcast_convert_type(
            memory.load(block.refs.squares.at[token], places)[0], jnp.float32
        )
        places = jnp.where(thread < BLOCK_WARPS, token * BLOCK_WARPS + thread, -1)
        memory.scatter(block.smem["squares"], places, total)


def last_stream(block: Block, outs, exchange_number) -> None:
    """Stores the stream behind the last layer, which the block has taken; zeros for more tokens."""
    shape, thread = block.shape, block.thread()
    x, scaled, squares = outs
    features = shape.width // 2
    block.meet()
    for token in range(x.shape[0]):
        is_there = token < shape.batch
        for i in range(-(-features // (2 * LANES))):
            pair = only_pair(thread + 2 * LANES * i, shape.width)
            words = 2 * [lane.full(0)]
            if is_there:
                old, mine = (
                    jnp.where(pair < 0, -1, token * size + pair)
                    for size in (features, shape.row_words)
                )
                words = [
                    exchange.read(block.refs.words, exchange_number, old),
                    memory.gather(block.smem["x"], mine),
                ]
            for out, word in zip((x, scaled), words, strict=True):
                memory.store(out.at[token], pair, word)
        place = jnp.where(thread < BLOCK_WARPS, thread, -1)
        total = lane.full(0.0, jnp.float32)
        if is_there:
            mine = jnp.where(place < 0, -1, token * BLOCK_WARPS + place)
            total = memory.gather(block.smem["squares"], mine)
        memory.store(squares.at[token], place, lax.bitcast_convert_type(total, jnp.int32))

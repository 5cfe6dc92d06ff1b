"""The feed-forward block with all of its neurons.

`down` is `[H, D]`, so a thread block multiplies some of its rows and 64 of its columns: parts of
the product, which those that have the columns add up, in a fixed order.
"""

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import (
    activation,
    exchange,
    lane,
    memory,
    products,
    stream,
)
from pallas_kernels.hopper.decode.one_launch.block import Block, OfRows
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import TOKENS
from pallas_kernels.hopper.decode.one_launch.shape import DOWN, DOWN_COLUMNS, DOWN_ROWS

_COLUMN_TILES = DOWN_COLUMNS // ROWS
_WORDS_AT_ONCE = 24  # that are waited for together: each takes five registers


def post_hidden(block: Block, exchange_number, factor, scales: OfRows, biases: OfRows):
    """`product`'s functions that post the activations of 16 neurons."""
    shape = block.shape

    def prepare(row):
        pair = row + 2 * (lane.numbers() & 7)
        return [
            (stream.scales_at(scale, pair, 2), stream.bias_at(bias, pair))
            for scale, bias in zip(scales.activated, biases.activated, strict=True)
        ]

    def finish(row, part, prepared):
        @pl.when(stream.has_pairs(block))
        def _():
            place = stream.pair_of(block, row, shape.neurons)
            by = factor(stream.pair_token(block))

            def sums(which):
                of_rows, of_bias = prepared[which]
                found = stream.sums_of_pair(block, part + which)
                found = [one * by * scale for one, scale in zip(found, of_rows, strict=True)]
                return stream.with_bias(found, of_bias)

            halves = [activation.activated(z, shape.rectifier) for z in sums(0)]
            if shape.gated:
                linear = [activation.linear(u, shape.rectifier) for u in sums(1)]
                halves = [h * u for h, u in zip(halves, linear, strict=True)]
            if block.live is not None:
                pair = row + 2 * (lane.numbers() & 7)
                halves = [jnp.where(pair + j < block.live, halves[j], 0.0) for j in (0, 1)]
            exchange.post(block.refs.words, exchange_number, place, lane.pack(*halves))

    return prepare, finish


def add(block: Block, exchange_number, number, bias):
    """Adds the product with `down`, and its bias; exchange `exchange_number + 2` gets the stream.

    Returns the number of the next stage.
    """

    def unit(i, number):
        return _multiply(block, exchange_number, block.first[DOWN] + i, number)

    number = lax.fori_loop(0, block.many[DOWN], unit, number)
    columns, blocks = block.shape.width // ROWS, block.shape.blocks
    for start in range(0, columns, blocks):
        tile = lax.axis_index("block") + start
        pl.when(tile < columns)(lambda tile=tile: _add_up(block, exchange_number, tile, bias))
    return number


def _multiply(block: Block, exchange_number, unit, number):
    """Posts the product of some rows and 64 columns of `down`, float32."""
    shape, smem = block.shape, block.smem
    blocks = shape.width // DOWN_COLUMNS
    split, column = lax.div(unit, blocks), lax.rem(unit, blocks)
    first, stages = shape.rows_of_split(split)

    def stage(j, carry):
        number, sums = carry
        tokens = products.tokens_of_rows(smem["x"], j, block.wg, batch=shape.batch)
        slot = lax.rem(number, shape.slots)
        plgpu.barrier_wait(block.full.at[slot])
        sums = [[*of_columns] for of_columns in sums]
        sums = products.add_columns(block.down_ring.at[slot], tokens, sums, block.wg)
        plgpu.barrier_arrive(block.empty.at[slot])
        return number + 1, tuple(tuple(of_columns) for of_columns in sums)

    def some(i, carry):
        begin = i * shape.down_stages_at_once
        here = jnp.clip(stages - begin, 0, shape.down_stages_at_once)
        _receive(block, exchange_number, first + begin, here)
        block.meet()
        carry = lax.fori_loop(0, here, stage, carry)
        block.meet()  # nobody reads these activations, which lie where parts do
        return carry

    start = number, tuple(tuple(products.zeros(shape.tiles)) for _ in range(_COLUMN_TILES))
    turns = -(-shape.most_down_stages // shape.down_stages_at_once)
    number, sums = lax.fori_loop(0, turns, some, start)
    for which, of_columns in enumerate(sums):
        products.put(smem["parts"], jnp.int32(which), [*of_columns], block.wg)
    block.meet()
    own = lane.numbers() >> 3
    for turn in range(_COLUMN_TILES // 2):
        of_columns = 2 * turn + block.wg
        first = column * DOWN_COLUMNS + of_columns * ROWS + own
        for tile in range(shape.tiles):
            token = tile * TOKENS + (lane.numbers() & (TOKENS - 1))
            total = products.sum_of_warps(smem["parts"], of_columns, shape.tiles, own, token)
            at = (split * shape.batch + token) * shape.width + first
            place = jnp.where(token < shape.batch, at, -1)
            bits = lax.bitcast_convert_type(total, jnp.int32)
            exchange.post(block.refs.words, exchange_number + 1, place, bits)
    block.meet()  # before others come where the parts are
    return number


def _receive(block: Block, exchange_number, first, stages) -> None:
    """Takes the activations of `stages` times 128 neurons into shared memory."""
    shape, thread = block.shape, block.thread()
    most = shape.down_stages_at_once * DOWN_ROWS // 2
    known = block.groups * (ROWS // 2)  # of the others the activations are 0
    numbers = [thread + start for start in range(0, most, 2 * LANES)]
    at_once = max(1, _WORDS_AT_ONCE // len(numbers))
    for begin in range(0, shape.batch, at_once):
        inside, places = [], []
        for token in range(begin, min(begin + at_once, shape.batch)):
            for number in numbers:
                of_all = first * (DOWN_ROWS // 2) + number
                is_there = (number < stages * (DOWN_ROWS // 2)) & (of_all < known)
                place = exchange.place_of(token, of_all, shape.neurons)
                places.append(jnp.where(is_there, place, -1))
                inside.append(jnp.where(number < most, token * shape.row_words + number, -1))
        words = exchange.take(block.refs.words, exchange_number, places)
        for place, word in zip(inside, words, strict=True):
            memory.scatter(block.smem["x"], place, word)  # zeros past the last neuron


def _add_up(block: Block, exchange_number, tile, bias) -> None:
    """Adds the parts of 16 columns to the stream."""
    shape, words = block.shape, block.refs.words

    @pl.when(stream.has_pairs(block))
    def _():
        place = stream.pair_of(block, tile * ROWS, shape.width)
        before = exchange.read(words, exchange_number - 1, place)
        token, pair = block.thread() >> 3, lane.numbers() & 7
        of_bias = stream.bias_at(bias, tile * ROWS + 2 * pair)
        places = []
        for split in range(shape.down_splits):
            at = (split * shape.batch + token) * shape.width + tile * ROWS + 2 * pair
            places += [jnp.where(place < 0, -1, at + j) for j in (0, 1)]
        found = exchange.take(words, exchange_number + 1, places)
        found = [lax.bitcast_convert_type(one, jnp.float32) for one in found]
        sums = [sum(found[2 + j :: 2], found[j]) for j in (0, 1)]
        sums = stream.added(block, stream.with_bias(sums, of_bias), before)
        exchange.post(words, exchange_number + 2, place, lane.pack(*sums))

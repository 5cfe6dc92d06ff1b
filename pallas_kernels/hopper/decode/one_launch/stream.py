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
    factor=None,
    scales=None,
    bias=None,
    stream=None,
):
    """`product`'s functions that post the sums of rows: a lane has two rows of a token.

    Args:
      block: the block.
      exchange_number: where they are posted.
      features: of a token there.
      factor: a function of tokens whose result the sums are multiplied with.
      scales: float32 GMEM `[features]`, those of the rows of 8-bit floats; or None.
      bias: GMEM `[features]`, what is added to them; or None.
      stream: the exchange that has what they are added to, which the block has taken before.
    """
    words, parts = block.refs.words, block.smem["parts"]

    def prepare(row):
        pair, found = pair_of(block, row, features), []
        of_row = jnp.where(pair < 0, -1, row + 2 * (lane.numbers() & 7))
        if bias is not None:
            found += memory.load(bias, jnp.where(pair < 0, -1, of_row >> 1))
        if stream is not None:
            found.append(exchange.read(words, stream, pair))
        return scales_at(scales, of_row, 2), found

    def finish(row, part, prepared):
        @pl.when(block.wg == 0)
        def _():
            of_rows, added = prepared
            number, place = lane.numbers(), pair_of(block, row, features)
            sums = [
                products.sum_of_warps(parts, part, where_pair(number, place, j)) for j in (0, 1)
            ]
            if factor is not None:
                by = factor(jnp.where(place < 0, 0, number >> 3))
                sums = [one * by for one in sums]
            low, high = (one * by for one, by in zip(sums, of_rows, strict=True))
            for word in added:
                more = lane.unpack(word)
                low, high = low + more[0], high + more[1]
            exchange.post(words, exchange_number, place, lane.pack(low, high))

    return prepare, finish


def scales_at(scales, rows, count: int = 1) -> list:
    """The float32 `scales` of `count` rows from each lane's on; 1 if there are none."""
    if scales is None:
        return count * [1.0]
    return [lax.bitcast_convert_type(one, jnp.float32) for one in memory.load(scales, rows, count)]


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


def receive(block: Block, exchange_number, features: int, scale=None, *, rounds: bool) -> None:
    """Takes tokens into shared memory.

    Args:
      block: the block.
      exchange_number: what has them.
      features: of a token.
      scale: GMEM `[features]` of their norm, whose sums of squares go there, too; or None.
      rounds: whether they become 8-bit floats, with a scale for each.
    """
    shape = block.shape
    places = _places(block, features)
    scales = None if scale is None else _words(scale, places)
    block.meet()  # nobody reads what was there
    squares, found = [], []
    # Words of the first token alone are waited for: whoever posts them posts the others beside.
    # Those of four tokens fit into registers.
    for first in (0, *range(1, shape.batch, 4)):
        tokens = range(first, min(first + 4, shape.batch) if first else 1)
        wanted = [
            jnp.where(place < 0, -1, token * (features // 2) + place)
            for token in tokens
            for place in places
        ]
        words = exchange.take(block.refs.words, exchange_number, wanted, 2)
        for token in tokens:
            mine, words = words[: 2 * len(places)], words[2 * len(places) :]
            if scales is not None:
                squares.append(_sum_of_squares(mine))
                mine = scaled(mine, scales)
            found.append(mine)
            if not rounds:
                _put(block, token, places, mine)
    if scales is not None:
        _put_of_warps(block, "squares", lane.sums_of(squares))
    if rounds:
        _put_rounded(block, places, found)


def _places(block: Block, features: int) -> list[jax.Array]:
    """The first of each two neighbouring words of a token that a lane has; -1 past the last."""
    starts = range(0, features // 2, 4 * LANES)
    places = [2 * block.thread() + start for start in starts]
    return [jnp.where(place < features // 2, place, -1) for place in places]


def _words(ref, places) -> list[jax.Array]:
    return [word for place in places for word in memory.load(ref, place, 2)]


def _sum_of_squares(words) -> jax.Array:
    total = lane.full(0.0, jnp.float32)
    for word in words:
        low, high = lane.unpack(word)
        total += low * low + high * high
    return total


def scaled(words, scales) -> list[jax.Array]:
    """Words times those of the scale of a norm."""
    pairs = [(lane.unpack(word), lane.unpack(by)) for word, by in zip(words, scales, strict=True)]
    return [lane.pack(low * by[0], high * by[1]) for (low, high), by in pairs]


def _put(block: Block, token: int, places, words) -> None:
    row = token * block.shape.row_words
    for i, place in enumerate(places):
        for j, word in enumerate(words[2 * i : 2 * i + 2]):
            memory.scatter(block.smem["x"], jnp.where(place < 0, -1, row + place + j), word)


def _put_of_warps(block: Block, name: str, values) -> None:
    """Stores what each warp has of each token."""
    thread = block.thread()
    for token, value in enumerate(values):
        place = jnp.where(thread & 31 == 0, token * BLOCK_WARPS + (thread >> 5), -1)
        memory.scatter(block.smem[name], place, value)


def _put_rounded(block: Block, places, tokens) -> None:
    """Stores tokens as 8-bit floats, and their scales; see `quantised.rounded`."""
    smem, thread = block.smem, block.thread()
    _put_of_warps(block, "largest", lane.largest_of(tokens))
    block.meet()
    for token, words in enumerate(tokens):
        top = memory.gather(smem["largest"], lane.full(token * BLOCK_WARPS))
        for warp in range(1, BLOCK_WARPS):  # their bits are ordered as magnitudes are, NaN last
            more = memory.gather(smem["largest"], lane.full(token * BLOCK_WARPS + warp))
            top = jnp.maximum(top, more)
        largest = lax.bitcast_convert_type(top, jnp.float32)
        scale = jnp.where(largest > 0, jnp.maximum(largest * (1 / LARGEST), TINY), 1.0)
        scale = jnp.where(largest < jnp.inf, scale, jnp.nan)
        memory.scatter(smem["token_scales"], jnp.where(thread == 0, token, -1), scale)
        reciprocal, row = 1 / scale, token * block.shape.row_words
        for i, place in enumerate(places):
            pairs = [lane.unpack(word) for word in words[2 * i : 2 * i + 2]]
            four = lane.pack_four([number * reciprocal for pair in pairs for number in pair])
            memory.scatter(smem["x"], jnp.where(place < 0, -1, row + (place >> 1)), four)


def factor_of(block: Block, which: int, eps: float | None):
    """A function of each lane's token: what its sums in a product are multiplied with.

    Args:
      block: the block.
      which: of `Shape.shares`.
      eps: of the norm in front of the product; None if there is none.
    """
    if eps is None and block.shape.itemsize(which) == 2:
        return None

    def factor(token):
        found = lane.full(1.0, jnp.float32)
        if eps is not None:
            total = memory.gather(block.smem["squares"], token * BLOCK_WARPS)
            for warp in range(1, BLOCK_WARPS):
                total += memory.gather(block.smem["squares"], token * BLOCK_WARPS + warp)
            found = lax.rsqrt(total / block.shape.width + eps)
        if block.shape.itemsize(which) == 1:
            found *= memory.gather(block.smem["token_scales"], token)
        return found

    return factor


def first_stream(block: Block, *, rounds: bool) -> None:
    """Puts the tokens in front of the first layer into shared memory."""
    shape, thread = block.shape, block.thread()
    places, found = _places(block, shape.width), []
    for token in range(shape.batch):
        found.append(_words(block.refs.scaled.at[token], places))
        if not rounds:
            _put(block, token, places, found[-1])
        place = jnp.where(thread == 0, 0, -1)
        total = lax.bitcast_convert_type(
            memory.load(block.refs.squares.at[token], place)[0], jnp.float32
        )
        place = jnp.where(thread < BLOCK_WARPS, token * BLOCK_WARPS + thread, -1)
        memory.scatter(block.smem["squares"], place, total)
    if rounds:
        _put_rounded(block, places, found)


def last_stream(block: Block, outs, exchange_number) -> None:
    """Stores the stream behind the last layer, which the block has taken; zeros for more tokens."""
    shape, thread = block.shape, block.thread()
    x, scaled_x, squares = outs
    places = _places(block, shape.width)
    scales = _words(block.refs.scales[1].at[shape.layers - 1], places)
    block.meet()
    for token in range(x.shape[0]):
        is_there = token < shape.batch
        words = len(scales) * [lane.full(0)]
        if is_there:
            of_all = [jnp.where(p < 0, -1, token * (shape.width // 2) + p + j)
                      for p in places for j in (0, 1)]  # fmt: skip
            words = [exchange.read(block.refs.words, exchange_number, at) for at in of_all]
        for out, values in ((x, words), (scaled_x, scaled(words, scales))):
            for i, value in enumerate(values):
                place = places[i // 2]
                memory.store(out.at[token], jnp.where(place < 0, -1, place + i % 2), value)
        place = jnp.where(thread < BLOCK_WARPS, thread, -1)
        total = lane.full(0.0, jnp.float32)
        if is_there:
            mine = jnp.where(place < 0, -1, token * BLOCK_WARPS + place)
            total = memory.gather(block.smem["squares"], mine)
        memory.store(squares.at[token], place, lax.bitcast_convert_type(total, jnp.int32))

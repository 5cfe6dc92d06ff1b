"""The tokens in front of a product, in registers: how they come to each thread block.

Lanes 4 t ... 4 t + 3 of each warp have token t of each tile of eight, and of it the words that the
warp multiplies (`products.distances`). So nothing passes through shared memory but sums over
a token, which warps add up for norms and 8-bit floats.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.hopper.decode.one_launch import exchange, lane, memory, products
from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.norms import (
    Norm,
    layer_normed,
    own_token,
    put_of_warps,
)
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS
from pallas_kernels.hopper.decode.one_launch.shape import OUT, QKV
from pallas_kernels.quantised import LARGEST, TINY

Tokens = list[list[jax.Array]]  # of each tile the words of each stage
_REGISTERS = 176  # for tokens and for words that are waited for, each of which takes three


def receive(block: Block, exchange_number, which: int, norm: Norm | None = None) -> Tokens:
    """Takes the tokens that the matrices `which` are multiplied with.

    With an RMS norm they get its scale, and their sums of squares go to shared memory, for
    `factor_of`. For 8-bit floats they become such, with a scale for each.
    """
    shape, row, posted = block.shape, _Row.of(block, which), _Posted.of(block, which)
    is_rms, squares = norm is not None and norm.bias is None, []
    tiles, at_once = [], 16 if shape.token_words + 3 * 32 > _REGISTERS else 32
    for tile in range(shape.tiles):
        # Nobody reads what further tokens get.
        token = jnp.minimum(own_token(tile), shape.batch - 1)
        words, first = [], exchange.place_of(token, posted.first, posted.features)
        total = lane.full(0.0, jnp.float32)
        for start in range(0, len(row.distances) * row.together, at_once):
            scales = row.load(norm.scale, start, at_once) if norm is not None and is_rms else []
            some = exchange.take_row(
                block.refs.words, exchange_number, first, posted.left,
                posted.distances[start // posted.together :][: at_once // posted.together],
                posted.together,
            )  # fmt: skip
            total += lane.sum_of_squares(some) if is_rms else 0.0
            words += lane.times(some, scales) if is_rms else some
        if norm is not None and not is_rms:
            of_norm = row.load(norm.scale), row.load(norm.bias), norm.eps
            words = layer_normed(block, row.are_there, tile, words, *of_norm)
        tiles.append(words)
        squares.append(total)
    if is_rms:
        put_of_warps(block, "squares", 0, lane.sums_of(squares, 4))
    return _rounded(block, tiles) if shape.itemsize(which) == 1 else tiles


def first_stream(block: Block) -> Tokens:
    """The tokens in front of the first layer, as `receive` returns them."""
    shape, refs, row = block.shape, block.refs, _Row.of(block, QKV)
    tiles, warp = [], block.thread() >> 5
    for tile in range(shape.tiles):
        token = own_token(tile)
        tiles.append(row.load(refs.scaled, token=jnp.minimum(token, shape.batch - 1)))
    if refs.squares is not None:
        totals = []
        for tile in range(shape.tiles):
            token = own_token(tile)
            is_first = (token < shape.batch) & (warp == 0) & (lane.numbers() & 3 == 0)
            (total,) = memory.load(refs.squares, jnp.where(is_first, 4 * token, -1))
            totals.append(lax.bitcast_convert_type(total, jnp.float32))
        put_of_warps(block, "squares", 0, totals)
    return _rounded(block, tiles) if shape.itemsize(QKV) == 1 else tiles


def last_stream(block: Block, outs, exchange_number) -> None:
    """Stores the stream behind the last layer, which the block has taken; zeros for more tokens."""
    shape, thread = block.shape, block.thread()
    x, *in_front_of_norm = outs
    starts = range(0, shape.width // 2, BLOCK_WARPS * lane.WARP)
    places = [thread + start for start in starts]
    places = [jnp.where(place < shape.width // 2, place, -1) for place in places]
    if in_front_of_norm:
        of_norm = block.refs.scales[1].at[shape.layers - 1]
        scales = [memory.load(of_norm, place)[0] for place in places]
    block.meet()

    @pl.loop(0, x.shape[0])
    def _(token):
        is_there = token < shape.batch
        wanted = [
            jnp.where(is_there & (at >= 0), exchange.place_of(token, at, shape.width), -1)
            for at in places
        ]
        words = [exchange.read(block.refs.words, exchange_number, place) for place in wanted]
        stored = [(x, words)]
        if in_front_of_norm:
            scaled_x, squares = in_front_of_norm
            stored.append((scaled_x, lane.times(words, scales)))
        for out, values in stored:
            for place, value in zip(places, values, strict=True):
                memory.store(out.at[token], place, value)
        if not in_front_of_norm:
            return
        place = jnp.where(thread < BLOCK_WARPS, thread, -1)
        mine = jnp.where(is_there & (place >= 0), token * BLOCK_WARPS + place, -1)
        total = memory.gather(block.smem["squares"], mine)
        memory.store(squares.at[token], place, lax.bitcast_convert_type(total, jnp.int32))


class _Row(NamedTuple):
    """Which words of a token a lane has, bfloat16.

    Attributes:
      words: of a token.
      first: the first one.
      distances: from there of all, or of each first of two.
      together: how many lie so: two, if 8-bit floats are made of them.
    """

    words: int
    first: jax.Array
    distances: list[int]
    together: int

    @classmethod
    def of(cls, block: Block, which: int) -> "_Row":
        """Of the tokens that the matrices `which` are multiplied with."""
        shape = block.shape
        words = (shape.attended if which == OUT else shape.width) // 2
        together = 2 // shape.itemsize(which)
        distances = [together * distance for distance in products.distances(shape.stages(which))]
        return cls(words, together * products.first_word(block.wg), distances, together)

    @property
    def left(self) -> jax.Array | None:
        """How many words a token has from the first one on; None if it has all."""
        room = BLOCK_WARPS * 4 * len(self.distances) * self.together
        return None if self.words == room else self.words - self.first

    @property
    def are_there(self) -> list[jax.Array]:
        """Whether there is each word, or a token is shorter."""
        each = [distance for distance in self.distances for _ in range(self.together)]
        return [self.first + distance < self.words for distance in each]

    def load(self, ref, start: int = 0, count: int | None = None, token=0) -> list[jax.Array]:
        """Of the lane's words of a row of GMEM `ref` so many from one on, or all."""
        first, end = token * self.words + self.first, None if count is None else start + count
        places = slice(start // self.together, end and end // self.together)
        return memory.load_row(ref, first, self.left, self.distances[places], self.together)


class _Posted(NamedTuple):
    """The same words in an exchange.

    Attributes:
      features: of a token.
      first: the first word.
      distances: from there of all places, or of each first of two.
      together: how many lie so: two, or one if 8-bit floats are made of them.
      left: how many places further words could have; None if a token has all words.
    """

    features: int
    first: jax.Array
    distances: list[int]
    together: int
    left: jax.Array | None

    @classmethod
    def of(cls, block: Block, which: int) -> "_Posted":
        """Of the tokens that the matrices `which` are multiplied with."""
        row, is_wide = _Row.of(block, which), block.shape.itemsize(which) == 2
        # Words 8 apart lie 64 places apart; in between are the others of the same lane.
        own = [0] if is_wide else [0, 2]
        of_eight = [8 * distance for distance in row.distances if distance % 8 == 0]
        distances = [start + more for start in of_eight for more in own]
        left = None if row.left is None else 8 * (row.left + row.first % 8)
        return cls(2 * row.words, row.first, distances, 2 if is_wide else 1, left)


def _rounded(block: Block, tiles: Tokens) -> Tokens:
    """The tokens as 8-bit floats, whose scales go to shared memory; see `quantised.rounded`."""
    smem = block.smem
    put_of_warps(block, "largest", 0, lane.largest_of(tiles))
    block.meet()  # all of them are there
    found = []
    for tile, words in enumerate(tiles):
        token = own_token(tile)
        # Of the largest magnitudes that warps have, whose bits are ordered as they are, NaN last.
        of_warps = memory.gather_each(smem["largest"], token * BLOCK_WARPS, BLOCK_WARPS, 1)
        top = functools.reduce(jnp.maximum, of_warps)
        scale = scale_of(lax.bitcast_convert_type(top, jnp.float32))
        is_one = (block.thread() >> 5 == 0) & (lane.numbers() & 3 == 0)
        memory.scatter(smem["token_scales"], jnp.where(is_one, token, -1), scale)
        factor = 1 / scale
        halves = [half * factor for word in words for half in lane.unpack(word)]
        found.append([lane.pack_four(halves[i : i + 4]) for i in range(0, len(halves), 4)])
    return found


def scale_of(largest: jax.Array) -> jax.Array:
    """The scale of numbers with this largest magnitude; see `quantised.rounded`."""
    scale = jnp.where(largest > 0, jnp.maximum(largest * (1 / LARGEST), TINY), 1.0)
    return jnp.where(largest < jnp.inf, scale, jnp.nan)

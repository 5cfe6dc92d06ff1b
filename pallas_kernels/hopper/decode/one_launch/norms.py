"""Norms of the residual stream, whose sums over a token all lanes of a thread block share."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.decode.one_launch import lane, memory
from pallas_kernels.hopper.decode.one_launch.block import Block
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, TOKENS


class Norm(NamedTuple):
    """Of the stream: GMEM `[D]` each, the bias of a layer norm, or None; and its epsilon."""

    scale: Any
    bias: Any
    eps: float


def factor_of(block: Block, which: int, eps: float | None):
    """A function of each lane's token: what its sums in a product are multiplied with.

    Args:
      block: the block.
      which: of `Shape.shares`.
      eps: of the RMS norm in front of the product; None if there is none.
    """

    def factor(token):
        found = 1.0
        if eps is not None:
            found = lax.rsqrt(_of_warps(block, token) / block.shape.width + eps)
        if block.shape.itemsize(which) == 1:
            found *= memory.gather(block.smem["token_scales"], token)
        return found

    return factor


def layer_normed(
    block: Block, are_there, tile: int, words, scales, biases, eps: float
) -> list[jax.Array]:
    """The words of a tile behind a layer norm; 0 where there are none."""
    width, there = block.shape.width, [is_in for is_in in are_there for _ in range(2)]
    halves = _halves(words)
    mean = _over_block(block, tile, _sum(halves)) / width
    halves = [jnp.where(is_in, half - mean, 0.0) for is_in, half in zip(there, halves, strict=True)]
    squares = _sum([half * half for half in halves])
    # Others may still read the sums.
    factor = lax.rsqrt(_over_block(block, block.shape.tiles + tile, squares) / width + eps)
    terms = zip(halves, _halves(scales), _halves(biases), strict=True)
    found = [half * factor * by + added for half, by, added in terms]
    return [lane.pack(*pair) for pair in zip(found[::2], found[1::2], strict=True)]


def _halves(words) -> list[jax.Array]:
    return [half for word in words for half in lane.unpack(word)]


def _sum(values) -> jax.Array:
    return sum(values, lane.full(0.0, jnp.float32))


def _over_block(block: Block, rows: int, value) -> jax.Array:
    """The sum of a number over the lanes that have a token; `rows` says which eight rows of shared
    memory it takes."""
    put_of_warps(block, "squares", TOKENS * rows, [lane.sum_of(value, 4)])
    block.meet()
    return _of_warps(block, own_token(rows))


def _of_warps(block: Block, row) -> jax.Array:
    """What the warps have stored in a row, summed."""
    first, *others = memory.gather_each(block.smem["squares"], row * BLOCK_WARPS, BLOCK_WARPS, 1)
    return sum(others, first)


def own_token(tile: int) -> jax.Array:
    """The token of a tile that a lane has, among those of all tiles."""
    return TOKENS * tile + ((lane.numbers() >> 2) & (TOKENS - 1))


def put_of_warps(block: Block, name: str, row: int, values) -> None:
    """Stores what each warp has of its tokens, of each tile; four lanes have the same.

    The tokens take the rows of `name` from this one on.
    """
    for tile, value in enumerate(values):
        place = (row + own_token(tile)) * BLOCK_WARPS + (block.thread() >> 5)
        is_one = lane.numbers() & 3 == 0
        memory.scatter(block.smem[name], jnp.where(is_one, place, -1), value)

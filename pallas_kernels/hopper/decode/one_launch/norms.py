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


def scaled(words, scales) -> list[jax.Array]:
    """Words times those of the scale of a norm."""
    pairs = [(lane.unpack(word), lane.unpack(by)) for word, by in zip(words, scales, strict=True)]
    return [lane.pack(low * by[0], high * by[1]) for (low, high), by in pairs]


def sum_of_squares(words) -> jax.Array:
    total = lane.full(0.0, jnp.float32)
    for word in words:
        low, high = lane.unpack(word)
        total += low * low + high * high
    return total


def layer_normed(
    block: Block, places, tokens, each, scales, biases, eps: float
) -> list[list[jax.Array]]:
    """The words of each of some tokens behind a layer norm; 0 where places are negative."""
    width, there = block.shape.width, [place >= 0 for place in places for _ in range(4)]
    halves = [_halves(words) for words in each]
    means = [total / width for total in _over_block(block, tokens, map(_sum, halves))]
    halves = [
        [jnp.where(is_in, half - mean, 0.0) for is_in, half in zip(there, of_token, strict=True)]
        for of_token, mean in zip(halves, means, strict=True)
    ]
    squares = [_sum([half * half for half in of_token]) for of_token in halves]
    rows = [TOKENS + token for token in tokens]  # others may still read the sums
    factors = [lax.rsqrt(total / width + eps) for total in _over_block(block, rows, squares)]
    normed = []
    for of_token, factor in zip(halves, factors, strict=True):
        terms = zip(of_token, _halves(scales), _halves(biases), strict=True)
        found = [half * factor * by + added for half, by, added in terms]
        normed.append([lane.pack(*pair) for pair in zip(found[::2], found[1::2], strict=True)])
    return normed


def _halves(words) -> list[jax.Array]:
    return [half for word in words for half in lane.unpack(word)]


def _sum(values) -> jax.Array:
    return sum(values, lane.full(0.0, jnp.float32))


def _over_block(block: Block, rows, values) -> list[jax.Array]:
    """The sums of each of some numbers over all lanes; they take these rows of shared memory."""
    put_of_warps(block, "squares", rows, lane.sums_of([*values]))
    block.meet()
    return [_of_warps(block, lane.full(0) + row) for row in rows]


def _of_warps(block: Block, row) -> jax.Array:
    """What the warps have stored in a row, summed."""
    first, *others = memory.gather_each(block.smem["squares"], row * BLOCK_WARPS, BLOCK_WARPS, 1)
    return sum(others, first)


def put_of_warps(block: Block, name: str, tokens, values) -> None:
    """Stores what each warp has of each token; there is room for eight."""
    thread = block.thread()
    for token, value in zip(tokens, values, strict=True):
        place = jnp.where(thread & 31 == 0, token * BLOCK_WARPS + (thread >> 5), -1)
        memory.scatter(block.smem[name], place, value)

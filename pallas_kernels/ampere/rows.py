"""Products of few tokens with the rows of a matrix, of which a thread block has 16.

Its eight warps share the features, and their lanes load rows and tokens as `mma.sync` wants them,
without shared memory: in any order of the features, the same for both. No thread block needs
another, so there are no clusters. A second product reads the rows alone whose gates are open.

Results are by neuron: `[H, M]`, M a multiple of 8, in the dtype of the tokens.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.decode.one_launch import activation, lane, memory, products
from pallas_kernels.hopper.decode.one_launch.block import meet
from pallas_kernels.hopper.decode.one_launch.lane import WARPS
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, STAGE_WORDS, TOKENS
from pallas_kernels.rectifiers import Rectifier

_WIDE = 4  # words that a lane loads at once


def gate(
    x: jax.Array, w: jax.Array, live: jax.Array | None, rectifier: Rectifier
) -> tuple[jax.Array, jax.Array]:
    """`act(x @ w^T)`, and which of its rows are open.

    Where a product is -inf the gate is -0.0, and open: times an up of inf that is NaN.

    Args:
      x: `[M, D]`, up to 64 tokens.
      w: `[H, D]`.
      live: int32 `[1]`: gates of neurons from there on are 0; None: of none.
      rectifier: act.

    Returns:
      gates: `[H, M]`, M padded.
      masks: int32 `[H / 16, 4]`: a bit for each of 16 rows, set in one of the words at least if the
        row is open for a token.
    """
    h, tiles = len(w), _tiles(x)
    outs = _of_neurons(h, x), jax.ShapeDtypeStruct((h // ROWS, WARPS), jnp.int32)
    body = functools.partial(_gate, rectifier=rectifier)
    return _call("few_gate", body, outs, h, tiles)(x, w, live)


def hidden(
    x: jax.Array, w: jax.Array, gates: jax.Array, masks: jax.Array, rectifier: Rectifier
) -> jax.Array:
    """`gates * (x @ w^T)`, `[H, M]`, 0 where a gate is 0, of which no row of w is read then.

    Args:
      x, w: as of `gate`.
      gates, masks: from `gate`.
      rectifier: it may pass the product through a ReLU.
    """
    body = functools.partial(_hidden, rectifier=rectifier)
    call = _call("few_hidden", body, _of_neurons(len(w), x), len(w), _tiles(x))
    return call(x, w, gates, masks)


def _tiles(x: jax.Array) -> int:
    """Of eight tokens."""
    return pl.cdiv(len(x), TOKENS)


def _of_neurons(h, x):
    return jax.ShapeDtypeStruct((h, _tiles(x) * TOKENS), x.dtype)


def _call(name, body, outs, h, tiles):
    return plgpu.kernel(
        body,
        out_type=outs,
        scratch_types=dict(
            parts=plgpu.SMEM((tiles, BLOCK_WARPS, ROWS * TOKENS), jnp.float32),
            together=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(h // ROWS,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )


def _gate(x, w, live, gates, masks, *, parts, together, rectifier):
    _put_products(x, w, None, parts, together)
    limit = None if live is None else live[0]

    def of_token(neuron, token, total, is_open):
        g = activation.activated(total, rectifier, x.dtype)
        g = jnp.where(total == -jnp.inf, -0.0, g)
        if limit is not None:
            g = jnp.where(neuron < limit, g, 0.0)
        bits = lane.pack(g, g, x.dtype) & 0xFFFF
        memory.store(gates, neuron * gates.shape[1] + token, bits, bytes_of=2)
        return is_open | bits

    is_open = _for_tokens(parts, of_token)

    @pl.when(lax.axis_index("wg") == 0)
    def _():
        number = lane.numbers()
        bits = lane.ballot(is_open)
        place = jnp.where(number & 31 == 0, lax.axis_index("block") * WARPS + (number >> 5), -1)
        memory.store(masks, place, (bits | (bits >> ROWS)) & 0xFFFF)


def _hidden(x, w, gates, masks, out, *, parts, together, rectifier):
    block = lax.axis_index("block")
    of_warps = memory.load(masks, lane.full(block * WARPS), WARPS)
    mask = functools.reduce(jnp.bitwise_or, of_warps)
    pl.when(functools.reduce(jnp.bitwise_or, [masks[block, i] for i in range(WARPS)]) != 0)(
        functools.partial(_put_products, x, w, mask, parts, together)
    )

    def of_token(neuron, token, total, carry):
        place = neuron * gates.shape[1] + token
        (pair,) = memory.load(gates, place >> 1)
        bits = jnp.where(token & 1 == 1, pair >> 16, pair) & 0xFFFF
        g, _ = lane.unpack(bits, x.dtype)
        # Of a gate of 0 there may be no product.
        h = jnp.where(bits == 0, 0.0, g * activation.linear(total, rectifier))
        memory.store(out, place, lane.pack(h, h, x.dtype), bytes_of=2)
        return carry

    _for_tokens(parts, of_token)


def _put_products(x, w, mask, parts, together):
    """Puts the sums of each warp where `_for_tokens` finds them.

    With `mask` rows of w count as zeros, and are not read, whose bits are not set.
    """
    wg, tiles, words = lax.axis_index("wg"), len(parts), w.shape[1] // 2
    number = lane.numbers()
    group = (number >> 2) & 7
    of_warp = STAGE_WORDS // BLOCK_WARPS
    first = ((number >> 5) + 4 * wg) * of_warp + _WIDE * (number & 3)
    stages = pl.cdiv(words, STAGE_WORDS)
    left = None if words == stages * STAGE_WORDS else words - first
    begin = lax.axis_index("block") * ROWS + group
    rows = [(begin + half) * words + first for half in (0, 8)]
    are_open = [None if mask is None else (mask >> (group + half)) & 1 for half in (0, 8)]
    tokens = [(TOKENS * tile + group) * words + first for tile in range(tiles)]
    are_there = [TOKENS * tile + group < len(x) for tile in range(tiles)]
    sums = products.zeros(tiles)
    for stage in range(stages):
        distances = [STAGE_WORDS * stage + i for i in range(0, of_warp, 4 * _WIDE)]
        of_rows, of_tokens = (
            [
                memory.load_row(ref, place, left, distances, _WIDE, is_there=is_there)
                for place, is_there in zip(places, flags, strict=True)
            ]
            for ref, places, flags in ((w, rows, are_open), (x, tokens, are_there))
        )
        sums = products.add_words(of_rows, of_tokens, sums, dtype=w.dtype)
    products.put(parts, jnp.int32(0), sums, wg)
    meet(together)


def _for_tokens(parts, body):
    """The first warpgroup calls `body(neuron, token, sum, carry)` for the lanes' neurons, of which
    each has one, and some of the tokens; returns the last carry, of int32 zeros at first."""
    number, tiles = lane.numbers(), len(parts)
    own, first = number & (ROWS - 1), number >> 4
    neuron = lax.axis_index("block") * ROWS + own

    def of_tile(tile, carry):
        token = TOKENS * tile + first
        total = products.sum_of_warps(parts, jnp.int32(0), tiles, own, token)
        return body(neuron, token, total, carry)

    return lax.fori_loop(0, jnp.where(lax.axis_index("wg") == 0, tiles, 0), of_tile, lane.full(0))

"""Hidden activations of few tokens: products with the rows of w_gate, and with those rows of w_up
whose gates are open.

A thread block has some groups of 16 neurons. Its eight warps share the features, and their lanes
load rows and tokens as `mma.sync` wants them, without shared memory: in any order of the features,
the same for both. The next rows are on their way while others are multiplied, and tokens stay in
registers where they fit. No thread block needs another, so there are no clusters.

Results are by neuron: `[H, M]`, M a multiple of 8, in the dtype of the tokens.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import params
from pallas_kernels.hopper.common.support import sm_count
from pallas_kernels.hopper.decode.one_launch import (
    activation,
    lane,
    memory,
    open_lists,
    plan,
    products,
)
from pallas_kernels.hopper.decode.one_launch.block import meet
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WARPS
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, STAGE_WORDS, TOKENS
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights

_WIDE = 4  # words that a lane loads at once
_MOST_GROUPS = 7  # of a thread block: what 99 KB hold of 64 tokens
_HELD_WORDS = 128  # of tokens that a lane keeps in registers, at most
_ALL_WORDS = 192  # of tokens, sums and rows in registers
_AHEAD = 4  # stages of rows that are on their way, at most
_EVERY_ROW = (1 << ROWS) - 1  # a mask


def hidden(
    x: jax.Array, weights: Weights, rectifier: Rectifier
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`act(x @ w_gate^T) * (x @ w_up^T)`, without reading the rows of w_up whose gates are 0.

    Where a gate's product is -inf the gate is -0.0, and open: times an up of inf that is NaN.

    Args:
      x: `[M, D]`, up to 64 tokens.
      weights: without a gate, hidden are the gates.
      rectifier: act.

    Returns:
      gates, hidden: `[H, M]`, M padded.
      masks: int32 `[H / 16, 4]`: a bit for each of 16 rows, set in one of the words at least if the
        row is open for a token.
    """
    h, tiles = len(weights.down), pl.cdiv(len(x), TOKENS)
    groups = h // ROWS
    blocks = min(groups, pl.cdiv(groups, _MOST_GROUPS * sm_count()) * sm_count())
    most = pl.cdiv(groups, blocks)
    of_neurons = jax.ShapeDtypeStruct((h, tiles * TOKENS), x.dtype)
    kernel = plgpu.kernel(
        functools.partial(_kernel, groups=groups, rectifier=rectifier),
        out_type=(
            jax.ShapeDtypeStruct((groups, WARPS), jnp.int32),
            *len(weights.inner) * [of_neurons],
        ),
        scratch_types=dict(
            smem=dict(
                gates=plgpu.SMEM((most * tiles, LANES), jnp.int32),
                of_warps=plgpu.SMEM((most, WARPS), jnp.int32),
                masks=plgpu.SMEM((most,), jnp.int32),
                listed=plgpu.SMEM((most * ROWS,), jnp.int32),
                counts=plgpu.SMEM((BLOCK_WARPS,), jnp.int32),
                parts=plgpu.SMEM((2 * tiles, BLOCK_WARPS, ROWS * TOKENS), jnp.float32),
            ),
            together=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(blocks,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="few_hidden",
        compiler_params=params.UNORDERED,
    )
    masks, gates, *others = kernel(x, weights.activated, weights.linear, weights.live)
    return gates, *(others or [gates]), masks


@dataclass(frozen=True)
class _Block:
    """What a thread block multiplies.

    Attributes:
      x: GMEM `[M, D]`.
      first, count: its groups of neurons, int32 scalars.
      smem: shared memory, by name.
      together: the barrier of the two warpgroups.
      wg: int32 scalar, the warpgroup.
      number: of each lane in its warpgroup.
    """

    x: Any
    first: jax.Array
    count: jax.Array
    smem: dict[str, Any]
    together: Any
    wg: jax.Array
    number: jax.Array

    @property
    def tiles(self) -> int:
        return len(self.smem["parts"]) // 2

    @property
    def words(self) -> int:
        """Of a row, and of a token."""
        return self.x.shape[1] // 2

    @property
    def stages(self) -> int:
        return pl.cdiv(self.words, STAGE_WORDS)

    @property
    def token_words(self) -> int:
        """Of all tokens that a lane multiplies."""
        return self.stages * self.tiles * products.WORDS

    @property
    def ahead(self) -> int:
        """The stages of rows that are on their way."""
        held = min(self.token_words, _HELD_WORDS) + 4 * self.tiles
        return min(self.stages, _AHEAD, (_ALL_WORDS - held) // (2 * products.WORDS))

    def load(self, ref: Any, row: jax.Array, stage: int, is_there: jax.Array) -> list[jax.Array]:
        """A lane's words of a stage of its row of `ref`."""
        of_warp = STAGE_WORDS // BLOCK_WARPS
        own = ((self.number >> 5) + WARPS * self.wg) * of_warp + _WIDE * (self.number & 3)
        left = None if self.words % STAGE_WORDS == 0 else self.words - own
        distances = [STAGE_WORDS * stage + i for i in range(0, of_warp, 4 * _WIDE)]
        return memory.load_row(ref, row * self.words + own, left, distances, _WIDE, is_there)


def _kernel(x, w_gate, w_up, live, masks, gates, *hidden, smem, together, groups, rectifier):
    first, end = plan.part(lax.axis_index("block"), lax.axis_size("block"), groups)
    block = _Block(x, first, end - first, smem, together, lax.axis_index("wg"), lane.numbers())
    limit = None if live is None else live[0]
    own, of_tokens = block.number & (ROWS - 1), block.number & -ROWS

    def place_of(row, tile):
        token = TOKENS * tile + (of_tokens >> 4)
        return jnp.where(row < 0, -1, (first * ROWS + row) * gates.shape[1] + token)

    def kept(row, tile):
        return ((row >> 4) * block.tiles + tile) * LANES + of_tokens + (row & (ROWS - 1))

    def put_gates(i, sums):
        row, is_open = i * ROWS + own, lane.full(0)
        for tile, total in enumerate(sums):
            g = activation.activated(total, rectifier, x.dtype)
            g = jnp.where(total == -jnp.inf, -0.0, g)
            if limit is not None:
                g = jnp.where(first * ROWS + row < limit, g, 0.0)
            bits = lane.pack(g, g, x.dtype) & 0xFFFF
            memory.store(gates, place_of(row, tile), bits, bytes_of=2)
            for out in hidden:  # what stays of rows that are not open
                memory.store(out, place_of(row, tile), lane.full(0), bytes_of=2)
            memory.scatter(smem["gates"], kept(row, tile), bits)
            is_open = is_open | bits
        bits = lane.ballot(is_open)
        bits = (bits | (bits >> ROWS)) & _EVERY_ROW
        of_warp = jnp.where(block.number & 31 == 0, block.number >> 5, -WARPS * groups)
        memory.store(masks, (first + i) * WARPS + of_warp, bits)
        memory.scatter(smem["of_warps"], i * WARPS + of_warp, bits)

    def put_hidden(i, sums):
        row = open_lists.row_at(smem, i * ROWS + own, found, block.count)
        for tile, total in enumerate(sums):
            bits = memory.gather(smem["gates"], kept(row, tile))
            g, _ = lane.unpack(bits, x.dtype)
            # Another token's gate has opened the row if this one's is 0.
            h = jnp.where(bits == 0, 0.0, g * activation.linear(total, rectifier))
            memory.store(*hidden, place_of(row, tile), lane.pack(h, h, x.dtype), bytes_of=2)

    def every(number):
        return jnp.where(number < block.count * ROWS, number, -1)

    ring = _start(block, w_gate, every)
    tokens = _tokens(block)
    _for_groups(block, w_gate, ring, tokens, block.count, every, put_gates)
    if hidden:
        found = _list(block)
        is_open = functools.partial(open_lists.row_at, smem, found=found, groups=block.count)
        ring = _start(block, w_up, is_open)
        _for_groups(block, w_up, ring, tokens, pl.cdiv(found, ROWS), is_open, put_hidden)


def _list(block: _Block) -> jax.Array:
    """Lists the block's open rows by their numbers in the block; returns how many there are."""
    meet(block.together)  # all masks are there
    thread = block.number + LANES * block.wg
    place = jnp.where(thread < block.count, thread, -1)
    of_warps = [
        memory.gather(block.smem["of_warps"], jnp.where(place < 0, -1, place * WARPS + i))
        for i in range(WARPS)
    ]
    mask = functools.reduce(jnp.bitwise_or, of_warps)
    return open_lists.fill(block.smem, lambda: meet(block.together), thread, [place], [mask])


def _tokens(block: _Block) -> Callable[[int], list[list[jax.Array]]]:
    """What gives the words of each tile for a stage."""
    group = (block.number >> 2) & 7

    def load(stage):
        tokens = [TOKENS * tile + group for tile in range(block.tiles)]
        return [block.load(block.x, token, stage, token < len(block.x)) for token in tokens]

    if block.token_words > _HELD_WORDS:
        return load
    return [load(stage) for stage in range(block.stages)].__getitem__


def _start(block: _Block, w: Any, row_of: Callable[[jax.Array], jax.Array]) -> tuple:
    """Starts to load the first rows; `w` and `row_of` are as of `_for_groups`."""
    rows = functools.cache(lambda i: _rows(block, jnp.int32(i), row_of))
    stages = (divmod(stage, block.stages) for stage in range(block.ahead))
    return tuple(_load(block, w, rows(i), stage) for i, stage in stages)


def _rows(block, i, row_of):
    """A lane's two rows of the i-th group."""
    numbers = [i * ROWS + ((block.number >> 2) & 7) + half for half in (0, 8)]
    return [row_of(number) for number in numbers]


def _load(block, w, rows, stage):
    return [block.load(w, block.first * ROWS + row, stage, row >= 0) for row in rows]


def _for_groups(
    block: _Block,
    w: Any,
    ring: tuple,
    tokens: Callable[[int], list[list[jax.Array]]],
    count: jax.Array,
    row_of: Callable[[jax.Array], jax.Array],
    put: Callable[[jax.Array, list[jax.Array]], None],
) -> None:
    """Multiplies the tokens with groups of the block's rows.

    Args:
      block: the thread block.
      w: GMEM `[H, D]`.
      ring: from `_start`.
      tokens: from `_tokens`.
      count: of groups, int32 scalar.
      row_of: gives the row in the block of each lane's number; -1 where it has none.
      put: `put(i, sums)` is called by the first warpgroup: of each tile the sum for each lane's
        row, the (number & 15)-th of the group, and token, the (number >> 4)-th of the tile.
    """

    def of_group(i, ring):
        lane.keep_loop()
        ring, rows = [*ring], functools.cache(lambda further: _rows(block, i + further, row_of))
        sums = products.zeros(block.tiles)
        for stage in range(block.stages):
            sums = products.add_words(ring.pop(0), tokens(stage), sums, dtype=w.dtype)
            further, following = divmod(stage + block.ahead, block.stages)
            ring.append(_load(block, w, rows(further), following))
        buffer = i & 1  # the second warpgroup may be a group ahead
        products.put(block.smem["parts"], buffer, sums, block.wg)
        meet(block.together)

        @pl.when(block.wg == 0)
        def _():
            parts, own = block.smem["parts"], block.number & (ROWS - 1)
            places = [TOKENS * tile + (block.number >> 4) for tile in range(block.tiles)]
            put(i, [products.sum_of_warps(parts, buffer, block.tiles, own, t) for t in places])

        return tuple(ring)

    lax.fori_loop(0, count, of_group, ring)

"""Tile unions: the neurons that the tokens of a row tile use, but for tokens that are left out.

The rows of `x: [M, D]` are cut into R = ceil(M / 256) row tiles of 256 tokens; each tile's up and
down projections are dense matmuls over the union of its tokens' active neurons. (Graph and sparse
matrix kernels call this column condensing within row windows: TC-GNN, DTC-SpMM.) The gate matmul
(`gate_union`) describes the non-zeros of the gate `g: [M, H]` by

    gate    [R, H, 256], dtype of g   neuron n's gates in row tile r; specified where bit n of
                                      masks[0, r] is set
    masks   uint32 [2, R, H / 32]     bit n % 32 of word n // 32: neuron n has a non-zero gate for
                                      any token (masks[0]), or for any token that is not outlying in
                                      the neuron's group (masks[1])
    counts  uint8 [H / 64, R * 256]   a token's non-zeros among the 64 neurons of a group, 0 to 64,
                                      plus 128 if the group's first pre-activation is inf or NaN

Tokens past M have gates of zero, or unspecified ones where a weight is not finite. A token is
outlying in a group if its count, flag included, exceeds OUTLYING_ABOVE: a single token, such as the
first of a sequence, may widen its tile's union by most of H. `decide` says which tokens leave their
unions.

Values on a union are stored in blocks `[128, 256]`, neurons by tokens; block i belongs to item i of
the work list in the `Plan`.
"""

import dataclasses
from fractions import Fraction

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.twell import MAX_COLUMNS
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import DTYPES

TILE_TOKENS = 256  # tokens of a row tile
GROUP_NEURONS = 64  # neurons among which a token's non-zeros are counted
CHUNK_NEURONS = 128  # neurons of a work item
OUTLYING_ABOVE = 16  # non-zeros in a group: 1.5 times the most seen at nnz of up to 300 of 5632
MAX_HEAVY = 256  # the capacity of sparse gradients for tokens outside the unions
DENSE_COST = Fraction(3, 2)  # a token takes three matmuls if computed densely, two on a union


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What the up and the down projection compute for each row tile.

    Attributes:
      neurons: int32 `[R, H]`, the union of each tile in ascending order; unspecified past its size.
      sizes: int32 `[R]`, neurons in each union.
      items: int32 `[max_items]`, the work list, tile by tile: `tile * (H / 128) + chunk` for
        each chunk of 128 neurons of a union, the last one maybe partial; unspecified from
        `item_count` on.
      item_count: int32 `[1]`, the number of items.
      firsts: int32 `[R]`, index of each tile's first item in the list; its others follow in order.
    """

    neurons: jax.Array
    sizes: jax.Array
    items: jax.Array
    item_count: jax.Array
    firsts: jax.Array

    def item_neurons(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What each item computes, in the order of the list.

        Returns:
          tile: int32 `[max_items, 1]`, its row tile.
          neurons: int32 `[max_items, 128]`, its neurons.
          in_union: bool `[max_items, 128]`, whether there is such a neuron, and such an item.
        """
        chunks = self.neurons.shape[1] // CHUNK_NEURONS
        tile, chunk = self.items[:, None] // chunks, self.items[:, None] % chunks
        column = chunk * CHUNK_NEURONS + jnp.arange(CHUNK_NEURONS)
        is_item = jnp.arange(len(self.items)) < self.item_count
        return tile, self.neurons[tile, column], (column < self.sizes[tile]) & is_item[:, None]


def first_row(blocks: jax.Array, factors: int, i: int) -> int:
    """The row at which factor `i` of `factors` begins in the `blocks: [items, 128 or 256, 256]`.

    The last factor ends the block; rows above the first one hold something else.
    """
    return blocks.shape[1] - CHUNK_NEURONS * (factors - i)


def to_dense(blocks: jax.Array, plan: Plan, m: int) -> list[jax.Array]:
    """The factors that blocks hold, `[H, m]` each: neurons by tokens, 0 outside the unions.

    Args:
      blocks: `[items, 128, 256]`, or `[items, 256, 256]` of two factors.
      plan: which neurons and tokens each block holds.
      m: number of tokens.
    """
    factors = blocks.shape[1] // CHUNK_NEURONS
    rows = rows_of_blocks(plan, blocks.shape[1])
    lines = blocks.reshape(-1, TILE_TOKENS)
    # XLA reads rows where it needs them; to write them to their places would take an array of zeros
    # first.
    found = (
        lines.at[rows + first_row(blocks, factors, i)].get(mode="fill", fill_value=0)
        for i in range(factors)
    )
    return [a.reshape(len(rows), -1)[:, :m] for a in found]


def rows_of_blocks(plan: Plan, height: int) -> jax.Array:
    """Where each neuron of each tile is in blocks of `height` rows.

    Returns:
      int32 `[H, R]`, the row in the first 128 of a block, counted over all blocks; past the last
        one for a neuron that the tile's union does not have.
    """
    tile, neurons, in_union = plan.item_neurons()
    tiles, h = plan.neurons.shape
    rows = height * jnp.arange(len(tile))[:, None] + jnp.arange(CHUNK_NEURONS)
    places = jnp.where(in_union, neurons, h), tile
    return jnp.full((h, tiles), len(tile) * height).at[places].set(rows, mode="drop")


def check_columns(name: str, dense: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises ValueError unless tile unions can describe the matrix `dense`."""
    if (
        dense.ndim != 2
        or not dense.shape[0]
        or dense.dtype not in DTYPES
        or dense.shape[1] % CHUNK_NEURONS
        or not 0 < dense.shape[1] <= MAX_COLUMNS
    ):
        raise ValueError(
            f"{name} must be a bfloat16 or float16 [M, H] with M > 0 and H a multiple of "
            f"{CHUNK_NEURONS} up to {MAX_COLUMNS}, got {dense.dtype} {list(dense.shape)}"
        )


def pack(
    z: jax.Array, dtype: jax.typing.DTypeLike, rectifier: Rectifier = RELU
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Describes `act(z)` rounded to `dtype` by `(gate, masks, counts)`; all of gate is specified.

    `z` are the pre-activations, float32 `[M, H]`, H a multiple of 128.
    """
    return describe(rectifier.gate(z, dtype).astype(dtype), jnp.isfinite(z[:, ::GROUP_NEURONS]))


def describe(gate: jax.Array, is_finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(gate, masks, counts)` for a 16-bit gate `[M, H]`; all of gate is specified.

    An entry is a non-zero if its bits are not all 0. `is_finite`, bool `[M, H / 64]`, says whether
    the first pre-activation of each group is finite.
    """
    m, h = gate.shape
    gate, is_finite = (jnp.pad(a, ((0, -m % TILE_TOKENS), (0, 0))) for a in (gate, is_finite))
    is_finite |= jnp.arange(len(is_finite))[:, None] >= m
    used = lax.bitcast_convert_type(gate, jnp.uint16) != 0
    counts = jnp.sum(used.reshape(-1, h // GROUP_NEURONS, GROUP_NEURONS), axis=-1)
    usual = jnp.repeat(is_finite & (counts <= OUTLYING_ABOVE), GROUP_NEURONS, axis=1)
    masks = [jnp.any(a.reshape(-1, TILE_TOKENS, h), axis=1) for a in (used, used & usual)]
    counts = jnp.where(is_finite, counts, counts + 128).astype(jnp.uint8)
    return gate.reshape(-1, TILE_TOKENS, h).mT, to_words(jnp.stack(masks)), counts.T


def unpack(gate: jax.Array, masks: jax.Array, m: int) -> jax.Array:
    """The gate `[m, H]` that `gate [R, H, 256]` and `masks` describe."""
    g = jnp.where(to_bits(masks[0])[:, :, None], gate, 0)
    return g.mT.reshape(-1, gate.shape[1])[:m]


def tiles_of(masks: jax.Array) -> jax.Array:
    """In how many row tiles each neuron has a non-zero gate for any token, int32 `[H]`."""
    return jnp.sum(to_bits(masks[0]), axis=0, dtype=jnp.int32)


def tiles_of_dense(active: jax.Array) -> jax.Array:
    """The same of dense activations `[..., H]`; H may be any number."""
    return jnp.sum(jnp.any(in_tiles(active), axis=1), axis=0, dtype=jnp.int32)


def in_tiles(active: jax.Array) -> jax.Array:
    """Where dense activations `[..., H]` are not 0, by row tile: bool `[R, 256, H]`.

    The tokens are cut into tiles in order. If there are fewer than 256, they are one tile.
    """
    used = active.reshape(-1, active.shape[-1]) != 0
    tile = min(TILE_TOKENS, len(used))
    used = jnp.pad(used, ((0, -len(used) % tile), (0, 0)))
    return used.reshape(-1, tile, used.shape[1])


def to_words(bits: jax.Array) -> jax.Array:
    """Packs the last axis of `bits` (bool) into uint32 words, the first bit lowest."""
    bits = bits.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def to_bits(words: jax.Array) -> jax.Array:
    """The inverse of `to_words`."""
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(*words.shape[:-1], -1) != 0


def who_leaves(
    every: jax.Array, usual: jax.Array, outlying: jax.Array, h: int, max_heavy: int | None = None
) -> jax.Array:
    """Whether the outlying tokens of each row tile leave its union, to save operations: bool `[R]`.

    Args:
      every: int32 `[R]`, the neurons that any token of the tile uses.
      usual: int32 `[R]`, those that any does that is not outlying in the neuron's group.
      outlying: int32 `[R]`, the tokens that may leave.
      h: number of neurons.
      max_heavy: the most tokens that may leave all tiles; None for any number. From the tile on in
        which they become more, they stay.
    """
    saved = TILE_TOKENS * DENSE_COST.denominator * (every - usual)
    leave = saved > DENSE_COST.numerator * h * outlying
    if max_heavy is None:
        return leave
    return leave & (jnp.cumsum(jnp.where(leave, outlying, 0)) <= max_heavy)


def chunks_needed(
    every: jax.Array, usual: jax.Array, outlying: jax.Array, h: int, max_heavy: int = MAX_HEAVY
) -> jax.Array:
    """The started chunks of each union, int32 `[R]`, if at most `max_heavy` tokens may leave; the
    other arguments are those of `who_leaves`."""
    leave = who_leaves(every, usual, outlying, h, max_heavy)
    return -(-jnp.where(leave, usual, every) // CHUNK_NEURONS)


def needs_of(stats: jax.Array, h: int) -> jax.Array:
    """What sparse gradients need, by `stats_of_tiles`, int32 `[2]`: the chunks of all unions; and
    the tokens that are not finite, for which nothing suffices."""
    every, usual, outlying, not_finite = stats.T
    return jnp.stack([jnp.sum(chunks_needed(every, usual, outlying, h)), jnp.sum(not_finite)])


def decide(
    masks: jax.Array, counts: jax.Array, m: int, max_items: int, max_heavy: int | None = None
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Decides which tokens leave the unions: to save operations, past the capacity or not finite.

    Args:
      masks: uint32 `[2, R, H / 32]`.
      counts: uint8 `[H / 64, R * 256]`.
      m: number of tokens.
      max_items: length of the work list. From the first tile whose items do not fit, all tokens
        leave.
      max_heavy: see `who_leaves`.

    Returns:
      union: uint32 `[R, H / 32]`, bits of the neurons in each union: at least those that
        remaining tokens use.
      sizes: int32 `[R]`, neurons in each union.
      heavy: uint32 `[R, 8]`, bits of the tokens that leave.
      nnz: int32 `[m]`, non-zeros of each token.
    """
    tiles, h = masks.shape[1], 32 * masks.shape[2]
    nnz = jnp.sum(counts & 127, axis=0, dtype=jnp.int32)
    every_size, usual_size, outlying, not_finite = tokens_of_tiles(masks, counts, m)
    leave = who_leaves(every_size, usual_size, jnp.sum(outlying, axis=1), h, max_heavy)
    sizes = jnp.where(leave, usual_size, every_size)
    fits = (jnp.cumsum(-(-sizes // CHUNK_NEURONS)) <= max_items)[:, None]
    union = jnp.where(fits, jnp.where(leave[:, None], masks[1], masks[0]), 0)
    heavy = (outlying & leave[:, None]) | not_finite
    is_token = jnp.arange(tiles * TILE_TOKENS) < m
    heavy |= is_token.reshape(tiles, TILE_TOKENS) & ~fits
    return union, jnp.where(fits[:, 0], sizes, 0), to_words(heavy), nnz[:m]


def stats_of_tiles(masks: jax.Array, counts: jax.Array, m: int) -> jax.Array:
    """int32 `[R, 4]`, for each tile how many of what `tokens_of_tiles` returns there are."""
    every, usual, *tokens = tokens_of_tiles(masks, counts, m)
    sums = (jnp.sum(some, axis=1, dtype=jnp.int32) for some in tokens)
    return jnp.stack([every, usual, *sums], axis=1)


def tokens_of_tiles(
    masks: jax.Array, counts: jax.Array, m: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """What `decide` goes by.

    Args: as of `decide`.

    Returns:
      every, usual: int32 `[R]`, as of `who_leaves`.
      outlying: bool `[R, 256]`, tokens that are outlying in any group, and finite.
      not_finite: bool `[R, 256]`, tokens with pre-activations that are known not to be finite.
    """
    every, usual = jnp.sum(lax.population_count(masks), axis=-1, dtype=jnp.int32)
    most = jnp.where(jnp.arange(counts.shape[1]) < m, jnp.max(counts, axis=0), 0)
    most = most.reshape(-1, TILE_TOKENS)
    not_finite = most > 127
    return every, usual, (most > OUTLYING_ABOVE) & ~not_finite, not_finite

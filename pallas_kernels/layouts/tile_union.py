"""Tile unions: the neurons that any token of a row tile uses, and which tokens they leave out.

The rows of `x: [M, D]` are cut into R = ceil(M / 256) row tiles of 256 tokens; each tile's up and
down projections are dense matmuls over the union of its tokens' active neurons. (Graph and sparse
matrix kernels call this column condensing within row windows: TC-GNN, DTC-SpMM.) The gate matmul
(`gate_union`) describes the non-zeros of the gate `g: [M, H]` by

    gate    [R, H, 256], dtype of g   neuron n's gates in row tile r; specified where bit n of
                                      masks[0, r] is set
    masks   uint32 [2, R, H / 32]     bit n % 32 of word n // 32: neuron n has a non-zero gate for
                                      any token (masks[0]), for any token that is not outlying in
                                      the neuron's group (masks[1])
    counts  uint8 [H / 64, R * 256]   a token's non-zeros among the 64 neurons of a group, 0 to 64,
                                      plus 128 if the pre-activation of the first of them is inf or
                                      NaN

Tokens past M have gates of zero, or unspecified ones where a weight is not finite. A token is
outlying in a group if its count, flag included, exceeds OUTLYING_ABOVE: one such token may widen
the union of its tile by most of H, as the first one of a sequence does. `decide` says which tokens
leave their unions.

What is computed for the neurons of a union comes in blocks `[128, 256]`, neurons by tokens: block i
belongs to item i of the work list in the `Plan`.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts.twell import DTYPES, MAX_COLUMNS

TILE_TOKENS = 256  # tokens of a row tile
GROUP_NEURONS = 64  # neurons among which a token's non-zeros are counted
CHUNK_NEURONS = 128  # neurons of a work item
OUTLYING_ABOVE = 16  # non-zeros of a group: 1.5 times what ordinary tokens had (up to 300 of 5632)
_DENSE_COST = 1.5  # a token computed densely takes three matmuls, on a union two


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Plan:
    """What the up and the down projection compute for each row tile.

    Attributes:
      neurons: int32 `[R, H]`, the union of each tile in ascending order; unspecified past its size.
      sizes: int32 `[R]`, neurons in each union.
      items: int32 `[max_items]`, work list, its tiles in any order: `tile * (H / 128) + chunk` for
        each started chunk of 128 neurons of a union; unspecified from `item_count` on.
      item_count: int32 `[1]`.
      firsts: int32 `[R]`, place of each tile's first item in the list; its others follow in order.
    """

    neurons: jax.Array
    sizes: jax.Array
    items: jax.Array
    item_count: jax.Array
    firsts: jax.Array

    def item_neurons(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """What each item computes, by its place in the list.

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
    """The row of a block `[128 or 256, 256]` at which the i-th of so many factors of h begins.

    The last factor is at the end; what lies above the first one is none of them.
    """
    return blocks.shape[1] - CHUNK_NEURONS * (factors - i)


def check_columns(name: str, dense: jax.Array | jax.ShapeDtypeStruct) -> None:
    """Raises ValueError unless `dense` is a matrix that has tile unions."""
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


def pack(z: jax.Array, dtype: jax.typing.DTypeLike) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Describes `relu(z)` rounded to `dtype` by `(gate, masks, counts)`, the gate complete.

    `z` are the pre-activations, float32 `[M, H]`, H a multiple of 128.
    """
    return describe(jnp.maximum(z, 0).astype(dtype), jnp.isfinite(z[:, ::GROUP_NEURONS]))


def describe(gate: jax.Array, is_finite: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(gate, masks, counts)` for a gate `[M, H]`, complete; an entry counts if its bits are not 0.

    `is_finite`, bool `[M, H / 64]`, says it of the first pre-activation of each group.
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


def fired(masks: jax.Array) -> jax.Array:
    """Whether each neuron has a non-zero gate for any token, bool `[H]`."""
    return jnp.any(to_bits(masks[0]), axis=0)


def to_words(bits: jax.Array) -> jax.Array:
    """Packs the last axis of `bits` (bool) into uint32 words, the first bit lowest."""
    bits = bits.reshape(*bits.shape[:-1], -1, 32).astype(jnp.uint32)
    return jnp.sum(bits << jnp.arange(32, dtype=jnp.uint32), axis=-1, dtype=jnp.uint32)


def to_bits(words: jax.Array) -> jax.Array:
    """The inverse of `to_words`."""
    bits = words[..., None] >> jnp.arange(32, dtype=jnp.uint32) & 1
    return bits.reshape(*words.shape[:-1], -1) != 0


def decide(
    masks: jax.Array, counts: jax.Array, m: int, max_items: int
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Which tokens leave the unions, so that fewer operations are left, or all work has room.

    Args:
      masks: uint32 `[2, R, H / 32]`.
      counts: uint8 `[H / 64, R * 256]`.
      m: number of tokens.
      max_items: items that there is room for. From the tile on whose items are one too many, all
        tokens leave.

    Returns:
      union: uint32 `[R, H / 32]`, bits of the neurons that the tokens that stay use.
      sizes: int32 `[R]`, how many these are.
      heavy: uint32 `[R, 8]`, bits of the tokens that leave.
      nnz: int32 `[m]`, non-zeros of each token.
    """
    tiles, h = masks.shape[1], 32 * masks.shape[2]
    nnz = jnp.sum(counts & 127, axis=0, dtype=jnp.int32)
    most = jnp.max(counts, axis=0)
    is_token = jnp.arange(most.size) < m
    outlying = ((most > OUTLYING_ABOVE) & is_token).reshape(tiles, TILE_TOKENS)
    not_finite = ((most > 127) & is_token).reshape(tiles, TILE_TOKENS)
    every_size, usual_size = jnp.sum(lax.population_count(masks), axis=-1, dtype=jnp.int32)
    saved = TILE_TOKENS * (every_size - usual_size)
    leave = saved > _DENSE_COST * h * jnp.sum(outlying & ~not_finite, axis=1)
    sizes = jnp.where(leave, usual_size, every_size)
    fits = (jnp.cumsum(-(-sizes // CHUNK_NEURONS)) <= max_items)[:, None]
    union = jnp.where(fits, jnp.where(leave[:, None], masks[1], masks[0]), 0)
    heavy = (outlying & leave[:, None]) | not_finite
    heavy |= is_token.reshape(tiles, TILE_TOKENS) & ~fits
    return union, jnp.where(fits[:, 0], sizes, 0), to_words(heavy), nnz[:m]

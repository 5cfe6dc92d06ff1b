"""The tile lasso of a block on tile unions, and its gradient for the hidden activation h.

The windows are those of whole sequences, as documents may make as many as there are tokens. Then a
window has the same number in every computation, and what is known of it is an array `[W, H]`: the
sums of squares of the neurons' activations, or what the gradient is as a multiple of h. A row tile
of 256 tokens consists of pieces, each of one window, so a row of a block adds to few of the sums.
All sums are products of matrices or sums of rows, in a fixed order.
"""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp

from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS, Plan
from twell_jax.ffn import lasso


@dataclass(frozen=True)
class WindowGrid:
    """How sequences are cut, but for the offset of the grid: what is known before a call.

    Attributes:
      sequence: tokens of a sequence.
      length: tokens of a whole window.
    """

    sequence: int
    length: int

    @property
    def of_sequence(self) -> int:
        """Windows that a sequence has, whatever the offset; the last one may be empty."""
        return -(-(self.sequence + self.length - 1) // self.length)

    @property
    def pieces(self) -> int:
        """The most pieces that 256 consecutive tokens consist of."""
        sequences = 1 + -(-(TILE_TOKENS - 1) // self.sequence)  # parts of so many, at most
        return min(TILE_TOKENS, TILE_TOKENS // self.length + 2 * sequences)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TokenWindows:
    """The windows of M tokens, M a multiple of `grid.sequence`.

    Attributes:
      of_token: int32 `[M]`, the number of each token's window.
      sizes: float32 `[W]`, the tokens of each window.
      grid: see `WindowGrid`.
    """

    of_token: jax.Array
    sizes: jax.Array
    grid: WindowGrid = field(metadata={"static": True})

    @classmethod
    def of(cls, grid: WindowGrid, offset: jax.Array, m: int) -> "TokenWindows":
        """The windows of m tokens; `offset` is that of `lasso.Windows`."""
        place, count = jnp.arange(m) % grid.sequence, m // grid.sequence
        number = jnp.arange(m) // grid.sequence * grid.of_sequence
        starts = jnp.arange(grid.of_sequence) * grid.length - offset
        first, end = (jnp.clip(a, 0, grid.sequence) for a in (starts, starts + grid.length))
        sizes = jnp.tile((end - first).astype(jnp.float32), count)
        return cls((number + (place + offset) // grid.length).astype(jnp.int32), sizes, grid)

    def pieces(self) -> tuple[jax.Array, jax.Array]:
        """How row tiles consist of pieces.

        Returns:
          int32 `[R, 256]`, the piece of each token. int32 `[R, P]`, the window of each piece; W if
          there is no such piece, or if it lies past the last token.
        """
        none = len(self.sizes)
        padding = -len(self.of_token) % TILE_TOKENS
        window = jnp.pad(self.of_token, (0, padding), constant_values=none)
        window = window.reshape(-1, TILE_TOKENS)
        begins = window[:, 1:] != window[:, :-1]
        piece = jnp.pad(jnp.cumsum(begins, axis=1, dtype=jnp.int32), ((0, 0), (1, 0)))
        is_in = piece[:, None] == jnp.arange(self.grid.pieces)[:, None]
        return piece, jnp.min(jnp.where(is_in, window[:, None], none), axis=2)


def sums_of_tokens(h: jax.Array, windows: jax.Array, count: int) -> jax.Array:
    """The sums of squares over some tokens, float32 `[W, H]`.

    Args:
      h: `[n, H]`, their hidden activations.
      windows: int32 `[n]`, their windows; those of other numbers do not count.
      count: W.
    """
    member = windows == jnp.arange(count)[:, None]
    h = jnp.where((windows < count)[:, None], h, 0).astype(jnp.float32)
    return jnp.dot(member.astype(jnp.float32), h * h, precision="highest")


def sums_of_unions(hidden: jax.Array, plan: Plan, windows: TokenWindows) -> jax.Array:
    """The sums of squares over the tokens on the unions, float32 `[W, H]`.

    Args:
      hidden: blocks whose last 128 rows are h, as of `union_up`.
      plan: which neurons and tokens each block holds.
      windows: the windows.
    """
    piece, window = windows.pieces()
    tile, _, in_union = plan.item_neurons()
    h = hidden[:, -CHUNK_NEURONS:].astype(jnp.float32)
    is_in = piece[tile] == jnp.arange(windows.grid.pieces)[:, None]  # [items, P, 256]
    counts = is_in[:, None] & in_union[:, :, None, None]
    of_rows = jnp.sum(jnp.where(counts, (h * h)[:, :, None], 0), axis=3)  # [items, 128, P]
    rows = tile_union.rows_of_blocks(plan, CHUNK_NEURONS)
    of_rows = of_rows.reshape(-1, windows.grid.pieces)
    found = of_rows.at[rows].get(mode="fill", fill_value=0)  # [H, R, P]
    count = len(windows.sizes)
    found = jnp.where(window < count, found, 0).reshape(len(rows), -1)
    member = window.reshape(-1) == jnp.arange(count)[:, None]
    return jnp.dot(member.astype(jnp.float32), found.T, precision="highest")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slopes:
    """The gradient of the lasso for h, as a multiple of h.

    Attributes:
      multiples: float32 `[W, H]`, by window and neuron.
      windows: the windows.
    """

    multiples: jax.Array
    windows: TokenWindows

    def of_tokens(self, h: jax.Array, tokens: jax.Array) -> jax.Array:
        """The gradient, float32, for `h: [n, H]` of these tokens, int32 `[n]`; 0 past the last."""
        window = self.windows.of_token.at[tokens].get(mode="fill", fill_value=len(self.multiples))
        return self.multiples.at[window].get(mode="fill", fill_value=0) * h.astype(jnp.float32)

    def of_unions(self, hidden: jax.Array, plan: Plan) -> jax.Array:
        """The gradient for h in the last 128 rows of blocks, `[items, 128, 256]` in their dtype."""
        piece, window = self.windows.pieces()
        tile, neurons, in_union = plan.item_neurons()
        h = hidden[:, -CHUNK_NEURONS:].astype(jnp.float32)
        places = window[tile[:, 0]][:, None], neurons[:, :, None]
        of_pieces = self.multiples.at[places].get(mode="fill", fill_value=0)  # [items, 128, P]
        of_tokens = jnp.take_along_axis(of_pieces, piece[tile], axis=2, mode="clip")
        return jnp.where(in_union[:, :, None], of_tokens * h, 0).astype(hidden.dtype)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class WindowSums:
    """What the lasso and its gradient follow from.

    Attributes:
      squares: float32 `[W, H]`, the sums of squares of h over the tokens of each window.
      windows: the windows.
    """

    squares: jax.Array
    windows: TokenWindows

    def total(self) -> jax.Array:
        """The lasso times the number of tokens, float32 []."""
        return lasso.of_sums(self.squares, self.windows.sizes)

    def slopes(self, total_grad: jax.Array) -> Slopes:
        """The gradient for h; `total_grad`, float32 [], is that for `total`."""
        is_active = self.squares > 0
        roots = jnp.sqrt(jnp.where(is_active, self.squares, 1.0))
        multiples = jnp.where(is_active, jnp.sqrt(self.windows.sizes)[:, None] / roots, 0.0)
        return Slopes(total_grad * multiples, self.windows)

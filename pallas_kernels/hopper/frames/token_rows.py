"""One token's block by the rows behind its open gates, which the blocks of a cluster share out.

Each block lists its share of the gates, walks their rows of w_up and w_down (`gather.gather_ffn`),
and sends the others its sums of their columns.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device import cluster, gather, round_tokens, shares, token_columns
from pallas_kernels.layouts.rectifiers import Rectifier

_ROW_LOADS = 8  # 16-byte loads from each matrix that a lane keeps in flight, or one row's


class Part(NamedTuple):
    """What a block has of a token's result.

    Attributes:
      share: int32 scalar, which part of the columns it is.
      shares: of how many.
      y: float32 `[columns / shares]`.
      l1: float32 scalar, the sum of |h| of the whole token.
    """

    share: jax.Array
    shares: int
    y: jax.Array
    l1: jax.Array

    @property
    def columns(self) -> Any:
        """Which columns these are."""
        return pl.ds(self.share * self.y.size, self.y.size)

    def store_total(self, sums_ref, total) -> None:
        """Stores `total`, a scalar of this part, where `sums_ref: [parts]` has room for it."""
        token_columns.store_total(sums_ref, self.share, self.shares, total)


def lists(h: int, d: int, blocks: int) -> dict[str, Any]:
    """Shared memory for the open gates of a block's share, and for sums of products."""
    rows = max(1, _ROW_LOADS // gather.row_steps(d))
    return dict(
        entries=plgpu.SMEM((h // blocks + 2 * rows,), jnp.uint32),
        counts=plgpu.SMEM((2, 4), jnp.int32),
        sums=plgpu.SMEM((2, rows, 4), jnp.float32),
    )


def parts(d: int, blocks: int) -> dict[str, Any]:
    """Shared memory in which the parts of all blocks arrive."""
    return dict(
        y_parts=plgpu.SMEM((blocks, gather.row_width(d) // blocks), jnp.float32),
        l1_parts=plgpu.SMEM((blocks,), jnp.float32),
    )


def load_x(x_ref, squares_ref, active, lists, *, is_8_bits: bool, eps: float) -> jax.Array:
    """The normed x of a token, a float32 row.

    Args:
      x_ref: GMEM `[D]`.
      squares_ref: that of the token in `Stream.squares`; None if x is not to be normed.
      active: if it is False, x is zero.
      lists: of `lists`.
      is_8_bits: whether x is rounded to 8-bit floats before it is normed.
      eps: of the norm.
    """
    row = gather.load_row(x_ref, active)
    row = round_tokens.round_row(row, lists["sums"].at[0, 0]) if is_8_bits else gather.widen(row)
    if squares_ref is None:
        return row
    return row * token_columns.inverse_rms_of_one(squares_ref, x_ref.shape[0], eps)


def collect(gate_ref, share, blocks: int, lists) -> jax.Array:
    """Lists this block's share of a token's open gates (GMEM `[H]`), and counts them."""
    count = shares.collect_share(gate_ref, share, blocks, lists["entries"], lists["counts"])
    return (count + blocks - 1 - share) // blocks


def sum_rows(
    x_row, share, count, w_up, up_scale, w_down, lists, parts, arrived, rectifier: Rectifier
) -> Part:
    """This block's part of a token's result; all blocks of the cluster call it.

    Args:
      x_row: from `load_x`; None without a gate projection.
      share: int32 scalar, the block's rank in the cluster.
      count: from `collect`.
      w_up, up_scale, w_down, rectifier: as of `gather.gather_ffn`.
      lists, parts: of the functions of these names.
      arrived: of `cluster.prepare`.
    """
    y_parts, l1_parts = parts["y_parts"], parts["l1_parts"]
    cluster.expect(4 * (y_parts.size + l1_parts.size), arrived)
    entries, scratch = lists["entries"], lists["sums"]
    y, l1 = gather.gather_ffn(x_row, entries, count, w_up, w_down, scratch, rectifier, up_scale)
    cluster.send_parts(y, l1, share, y_parts, l1_parts, arrived)
    cluster.wait_for_parts(arrived)
    blocks = range(l1_parts.size)
    y = functools.reduce(jnp.add, [wide(y_parts.at[b]) for b in blocks])
    l1 = functools.reduce(jnp.add, [l1_parts[b] for b in blocks])
    return Part(share, len(blocks), y, l1)


def wide(ref) -> jax.Array:
    """`ref: [n]` in float32, two neighbours in each register if there are enough."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=min(2, ref.shape[0] // 128))
    return plgpu.load(ref, layout=layout).astype(jnp.float32)

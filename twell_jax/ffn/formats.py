"""Packed forms of sparse activation matrices as pytrees. Byte layouts: docs/formats.md."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels.layouts import tile_union, twell


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TwELL:
    """Tile-wise ELLPACK form of a sparse matrix `[M, H]` (arXiv 2603.23198, section 3).

    Attributes:
      packed: uint32 `[M, ceil(H / tile), tile / compression]`. In each row of each tile, word 0 is
        the exact number of entries. Each further word holds one entry, column | value bits << 16,
        in any order, as many as fit.
      columns: H.
      dtype: dtype of the values, bfloat16 or float16.
      tile: T, columns per tile.
      compression: C; a tile holds T / C - 1 entries of a row.
    """

    packed: jax.Array
    columns: int = field(metadata={"static": True})
    dtype: DTypeLike = field(metadata={"static": True})
    tile: int = field(metadata={"static": True})
    compression: int = field(metadata={"static": True})

    @property
    def counts(self) -> jax.Array:
        """int32 `[M, tiles]`, the exact number of entries of each row in each tile."""
        return self.packed[..., 0].astype(jnp.int32)

    @property
    def overflowed_rows(self) -> jax.Array:
        """bool `[M]`, rows with more entries in a tile than fit; they are not all stored."""
        return twell.overflowed(self.packed)


def pack(
    dense: jax.Array, *, tile: int = twell.TILE, compression: int = twell.COMPRESSION
) -> TwELL:
    """Packs `dense: [M, H]`, bfloat16 or float16.

    An entry is stored unless its 16 bits are all zero, so -0.0, subnormals and NaN are kept to the
    bit. A row that does not fit is reported by `overflowed_rows`, with exact `counts`.

    Raises:
      ValueError: for another dtype or rank, H over 65536, or an impossible tile or compression.

    Example:
      >>> g = jnp.zeros((2, 512), jnp.bfloat16).at[1, 300].set(2.0)
      >>> pack(g).counts.tolist()
      [[0, 0], [0, 1]]
    """
    packed = twell.pack(dense, tile=tile, compression=compression)
    return TwELL(packed, dense.shape[1], jnp.dtype(dense.dtype), tile, compression)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TileUnions:
    """A sparse matrix `[M, H]`, stored as the columns that any of 256 neighbouring rows uses.

    Attributes:
      gate: `[R, H, 256]`, bfloat16 or float16, R = ceil(M / 256): the columns of each row tile.
        Only those whose bit in `masks[0]` is set are specified.
      masks: uint32 `[2, R, H / 32]`, a bit per column: whether any row uses it, and whether any row
        does that is not outlying in its group of 64 columns.
      counts: uint8 `[H / 64, R * 256]`, the non-zeros of each row in each group. Above 16 the row
        is outlying there; 128 is added if the group's first column was not finite before the ReLU.
      rows: M.
    """

    gate: jax.Array
    masks: jax.Array
    counts: jax.Array
    rows: int = field(metadata={"static": True})

    @property
    def nnz(self) -> jax.Array:
        """int32 `[M]`, the exact number of non-zeros of each row."""
        return jnp.sum(self.counts & 127, axis=0, dtype=jnp.int32)[: self.rows]

    @property
    def sizes(self) -> jax.Array:
        """int32 `[R]`, the number of columns in the union of each row tile."""
        return jnp.sum(jax.lax.population_count(self.masks[0]), axis=1, dtype=jnp.int32)


def pack_unions(dense: jax.Array) -> TileUnions:
    """Packs `dense: [M, H]`, bfloat16 or float16, H a multiple of 128 up to 65536.

    An entry is stored unless its 16 bits are all zero. Every matrix with at least one row fits.

    Raises:
      ValueError: for another dtype or shape.

    Example:
      >>> g = jnp.zeros((300, 128), jnp.bfloat16).at[1, 5].set(2.0).at[2, 7].set(1.0)
      >>> pack_unions(g).sizes.tolist()
      [2, 0]
    """
    tile_union.check_columns("dense", dense)
    packed = tile_union.describe(dense, jnp.isfinite(dense[:, :: tile_union.GROUP_NEURONS]))
    return TileUnions(*packed, rows=dense.shape[0])


def unpack(sparse: TwELL | TileUnions) -> jax.Array:
    """The dense `[M, H]` matrix, exact to the bit; rows that overflowed in TwELL are NaN."""
    if isinstance(sparse, TileUnions):
        return tile_union.unpack(sparse.gate, sparse.masks, sparse.rows)
    return twell.unpack(
        sparse.packed,
        sparse.columns,
        sparse.dtype,
        tile=sparse.tile,
        compression=sparse.compression,
    )

"""Packed forms of sparse activation matrices as pytrees. Byte layouts: docs/formats.md."""

from dataclasses import dataclass, field

import jax
import jax.numpy as jnp
from jax.typing import DTypeLike

from pallas_kernels import twell


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TwELL:
    """Tile-wise ELLPACK form of a sparse matrix `[M, H]` (arXiv 2603.23198, section 3).

    Attributes:
      packed: uint32 `[M, ceil(H / tile), tile / compression]`. In each row of each tile, word 0 is
        the exact number of entries and every further word is column | value bits << 16, for as many
        entries as fit, in any order.
      columns: H.
      dtype: of the values, bfloat16 or float16.
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
        """bool `[M]`, rows of which a tile has more entries than fit; they are not all stored."""
        return twell.overflowed(self.packed)


def pack(
    dense: jax.Array, *, tile: int = twell.TILE, compression: int = twell.COMPRESSION
) -> TwELL:
    """Packs `dense: [M, H]`, bfloat16 or float16.

    An entry is stored unless its 16 bits are all zero, so -0.0, subnormals and NaN are kept to the
    bit. A row that does not fit is reported by `overflowed_rows`, with exact `counts`.

    Raises:
      ValueError: for another dtype or rank, H over 65536, or a tile that compression does not fit.

    Example:
      >>> g = jnp.zeros((2, 512), jnp.bfloat16).at[1, 300].set(2.0)
      >>> pack(g).counts.tolist()
      [[0, 0], [0, 1]]
    """
    packed = twell.pack_reference(dense, tile=tile, compression=compression)
    return TwELL(packed, dense.shape[1], jnp.dtype(dense.dtype), tile, compression)


def unpack(sparse: TwELL) -> jax.Array:
    """The dense `[M, H]` matrix, exact to the bit; rows that overflowed are NaN throughout."""
    return twell.unpack(
        sparse.packed,
        sparse.columns,
        sparse.dtype,
        tile=sparse.tile,
        compression=sparse.compression,
    )

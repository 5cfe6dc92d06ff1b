"""TwELL, tile-wise ELLPACK: the packed form of a sparse activation matrix (arXiv 2603.23198).

The columns of `g: [M, H]` (bfloat16 or float16) are cut into tiles of `tile` columns; the last tile
may be narrower. Each row of each tile becomes `W = tile // compression` 32-bit words:

    word 0                  number of entries of that row in that tile; if it exceeds the capacity
                            W - 1, the row has overflowed, and is heavy
    word 1..min(count, W-1) column | bits << 16: global column index and the value's 16 bits
    words past the count    unspecified

The order of a tile's entries is unspecified. An entry is stored iff its 16 bits are not all zero,
so -0.0 and subnormals are entries; only +0.0 is not.
"""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.weights import DTYPES

TILE = 256
COMPRESSION = 8
MAX_COLUMNS = 1 << 16  # a column index has 16 bits
MAX_ROW_ENTRIES = 128  # a row with more is heavy, as dense_rows is faster (docs/design/0003)


def packed_shape(
    m: int, h: int, *, tile: int = TILE, compression: int = COMPRESSION
) -> tuple[int, int, int]:
    """Shape `(m, tiles, words)` of the packed form of an `[m, h]` matrix.

    Raises ValueError if `tile` does not hold at least two words of `compression` columns each or if
    `h` is not in 1..65536.
    """
    if compression < 1 or tile % compression or tile < 2 * compression:
        raise ValueError(
            f"tile must be a multiple of compression and hold at least two words, got {tile=} and "
            f"{compression=}"
        )
    if not 1 <= h <= MAX_COLUMNS:
        raise ValueError(f"a packed matrix has 1..{MAX_COLUMNS} columns, got {h}")
    return m, -(-h // tile), tile // compression


def overflowed(packed: jax.Array) -> jax.Array:
    """Which rows of `packed: uint32 [M, tiles, W]` lack entries, as `bool [M]`.

    Such a row has more entries in some tile than the W - 1 that fit.
    """
    return jnp.any(packed[..., 0] > packed.shape[-1] - 1, axis=-1)


def is_heavy(packed: jax.Array) -> jax.Array:
    """Which rows of `packed: uint32 [M, tiles, W]` are left to `dense_rows`, as `bool [M]`.

    They have overflowed, or have more than `MAX_ROW_ENTRIES` entries.
    """
    return overflowed(packed) | (jnp.sum(packed[..., 0], axis=1) > MAX_ROW_ENTRIES)


def pack(g: jax.Array, *, tile: int = TILE, compression: int = COMPRESSION) -> jax.Array:
    """Packs `g: [M, H]` (bfloat16 or float16) into TwELL, `uint32 [M, ceil(H / tile), W]`.

    Entries are in ascending column order and unused words are 0. Rows that overflow keep their true
    counts and their first W - 1 entries of each tile.

    Raises ValueError if `g` is not a 16-bit float matrix, and where `packed_shape` does.
    """
    if g.ndim != 2 or g.dtype not in DTYPES:
        raise ValueError(f"g must be a bfloat16 or float16 [M, H], got {g.dtype} {list(g.shape)}")
    m, h = g.shape
    _, tiles, words = packed_shape(m, h, tile=tile, compression=compression)
    bits = jnp.pad(lax.bitcast_convert_type(g, jnp.uint16), ((0, 0), (0, tiles * tile - h)))
    bits = bits.reshape(m * tiles, tile)
    count = jnp.cumsum(bits != 0, axis=1, dtype=jnp.int32)
    # The s-th entry of a tile is where the running count first reaches s; past the last entry, the
    # search gives `tile`.
    rank = jnp.arange(1, words)
    place = jax.vmap(lambda c: jnp.searchsorted(c, rank))(count)
    value = jnp.take_along_axis(bits, place, axis=1, mode="fill", fill_value=0).astype(jnp.uint32)
    column = place + tile * (jnp.arange(m * tiles) % tiles)[:, None]
    entry = jnp.where(value == 0, 0, column.astype(jnp.uint32) | value << 16)
    packed = jnp.concatenate([count[:, -1:].astype(jnp.uint32), entry], axis=1)
    return packed.reshape(m, tiles, words)


def unpack(
    packed: jax.Array,
    h: int,
    dtype: jax.typing.DTypeLike,
    *,
    tile: int = TILE,
    compression: int = COMPRESSION,
) -> jax.Array:
    """Unpacks `packed: uint32 [M, ceil(h / tile), W]` into `[M, h]` of `dtype` (bfloat16, float16).

    Bits are restored exactly, but rows that overflowed are NaN throughout.

    Raises ValueError if `packed` is not a TwELL of `h` columns or `dtype` not a 16-bit float.
    """
    dtype = jnp.dtype(dtype)
    if dtype not in DTYPES:
        raise ValueError(f"dtype must be bfloat16 or float16, got {dtype}")
    m = packed.shape[0]
    shape = packed_shape(m, h, tile=tile, compression=compression)
    if packed.shape != shape or packed.dtype != jnp.uint32:
        raise ValueError(
            f"packed must be uint32 {list(shape)} for {h} columns, {tile=} and {compression=}, got "
            f"{packed.dtype} {list(packed.shape)}"
        )
    column = _columns(packed, h)
    bits = (packed[..., 1:] >> 16).astype(jnp.uint16).reshape(column.shape)
    g = jnp.zeros((m, h), jnp.uint16).at[jnp.arange(m)[:, None], column].set(bits, mode="drop")
    g = lax.bitcast_convert_type(g, dtype)
    return jnp.where(overflowed(packed)[:, None], jnp.array(jnp.nan, dtype), g)


def fired(packed: jax.Array, h: int) -> jax.Array:
    """Columns with an entry in any row that did not overflow, `bool [h]`."""
    column = jnp.where(overflowed(packed)[:, None], h, _columns(packed, h))
    return jnp.zeros(h, bool).at[column].set(True, mode="drop")


def _columns(packed: jax.Array, h: int) -> jax.Array:
    """The column of every word but the counts, `[M, tiles * (W - 1)]`; h if it is no entry."""
    m, tiles, words = packed.shape
    rank = jnp.arange(1, words, dtype=jnp.uint32)
    column = jnp.where(rank <= packed[..., :1], packed[..., 1:] & 0xFFFF, h)
    return column.reshape(m, tiles * (words - 1))

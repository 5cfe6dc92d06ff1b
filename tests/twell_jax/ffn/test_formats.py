"""Any matrix round-trips to the bit, or TwELL reports a row as overflowed."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as st_numpy

from tests import seeds
from twell_jax import TwELL, pack, pack_unions, unpack

DTYPES = ["bfloat16", "float16"]
# tile, compression, columns: one tile, several, and a last tile that is not full
GEOMETRIES = {
    "bfloat16": [(8, 4, 8), (16, 8, 50), (256, 8, 300)],
    "float16": [(8, 1, 13), (16, 4, 1), (6, 3, 20), (256, 8, 300)],
}
# +-0, the largest and the smallest subnormal, +-1, +-inf, quiet and signalling NaNs of both dtypes
SPECIAL = [0x0, 0x8000, 0x1, 0x8001, 0x7F, 0x3FF, 0x3F80, 0xBF80, 0x3C00, 0x7F80, 0xFF80, 0x7C00]
SPECIAL += [0x7FC0, 0x7F81, 0x7E00, 0x7C01, 0xFFFF]


# Compiled, because step by step each of their operations would be a program of its own.
@functools.partial(jax.jit, static_argnames=("tile", "compression"))
def pack_and_unpack(dense, **geometry):
    """TwELL, the counts and overflowed rows that it reports, and the dense matrix again."""
    packed = pack(dense, **geometry)
    return packed, packed.counts, packed.overflowed_rows, unpack(packed)


@jax.jit
def unions_and_back(dense):
    """The numbers of non-zeros, the sizes of the unions, and the dense matrix again."""
    sparse = pack_unions(dense)
    return sparse.nnz, sparse.sizes, unpack(sparse)


def bits(array):
    return np.asarray(array).view(np.uint16)


def from_bits(array, dtype):
    return np.asarray(array, np.uint16).view(jnp.dtype(dtype))


def counts(matrix, tile):
    """Non-zero bit patterns of each row in each tile."""
    return np.stack(
        [
            np.count_nonzero(matrix[:, c : c + tile], axis=1)
            for c in range(0, matrix.shape[1], tile)
        ],
        axis=1,
    )


def decode(words):
    """{column: bits} of the words of one row of one tile, as docs/formats.md gives the layout."""
    count, entries = int(words[0]), [int(word) for word in words[1:]]
    return {word & 0xFFFF: word >> 16 for word in entries[:count]}


@st.composite
def matrices(draw, dtype):
    """A geometry and the bits of a [4, columns] matrix, each row with a density of its own."""
    tile, compression, columns = draw(st.sampled_from(GEOMETRIES[dtype]))
    element = st.integers(0, 2**16 - 1) | st.sampled_from(SPECIAL)
    values = draw(st_numpy.arrays(np.uint16, (4, columns), elements=element))
    # In steps of one entry around what a tile can hold.
    capacity = tile // compression - 1
    for row in values:
        for start in range(0, columns, tile):
            part = row[start : start + tile]
            keep = draw(st.sampled_from([0, 1, capacity - 1, capacity, capacity + 1, tile]))
            part[draw(st.permutations(range(len(part))))[max(keep, 0) :]] = 0
    return tile, compression, values


@pytest.mark.sampled(1)
@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_rows_round_trip_to_the_bit_or_are_reported(dtype, data):
    tile, compression, values = data.draw(matrices(dtype))
    packed, found, overflowed, dense = pack_and_unpack(
        from_bits(values, dtype), tile=tile, compression=compression
    )
    expected = counts(values, tile)
    fits = np.all(expected <= tile // compression - 1, axis=1)
    np.testing.assert_array_equal(found, expected)
    np.testing.assert_array_equal(overflowed, ~fits)
    assert packed.dtype == dense.dtype == dtype
    np.testing.assert_array_equal(bits(dense)[fits], values[fits])
    assert np.isnan(np.asarray(dense, np.float32)[~fits]).all()


@pytest.mark.parametrize("dtype", DTYPES)
@given(st.data())
def test_words_are_as_documented(dtype, data):
    tile, compression, values = data.draw(matrices(dtype))
    packed, *_ = pack_and_unpack(from_bits(values, dtype), tile=tile, compression=compression)
    words = np.asarray(packed.packed)
    assert words.dtype == np.uint32
    assert words.shape == (4, -(-values.shape[1] // tile), tile // compression)
    for row, tile_index in np.ndindex(words.shape[:2]):
        start = tile_index * tile
        part = values[row, start : start + tile]
        entries = {start + column: int(part[column]) for column in np.flatnonzero(part)}
        found = decode(words[row, tile_index])
        assert int(words[row, tile_index, 0]) == len(entries)
        assert len(found) == min(len(entries), tile // compression - 1)
        assert found.items() <= entries.items()


@pytest.mark.parametrize("dtype", DTYPES)
def test_unpack_takes_entries_in_any_order_and_ignores_spare_words(dtype):
    values = np.zeros((5, 40), np.uint16)
    values[:, [0, 3, 7, 17, 39]] = [0x8000, 1, 0x3C00, 0x7FFF, 0xFFFF]
    rng = seeds.rng()
    words = rng.integers(0, 2**32, (5, 3, 8), np.uint32)
    for row, tile in np.ndindex(words.shape[:2]):
        columns = rng.permutation(np.flatnonzero(values[row, tile * 16 : tile * 16 + 16]))
        columns += tile * 16
        words[row, tile, 0] = len(columns)
        words[row, tile, 1 : 1 + len(columns)] = columns | values[row, columns].astype(int) << 16
    packed = TwELL(words, 40, jnp.dtype(dtype), tile=16, compression=2)
    np.testing.assert_array_equal(bits(jax.jit(unpack)(packed)), values)


@pytest.mark.parametrize("dtype", DTYPES)
def test_defaults_at_the_size_of_a_model(dtype):
    # 22 tiles of 256; row i has i entries in its first tile, so that the last rows overflow.
    values = np.zeros((34, 5632), np.uint16)
    rng = seeds.rng()
    for row in range(34):
        values[row, rng.permutation(256)[:row]] = rng.integers(1, 2**16, row)
        values[row, rng.integers(256, 5632, 20)] = 0x8000
    packed, found, overflowed, dense = pack_and_unpack(from_bits(values, dtype))
    assert packed.packed.shape == (34, 22, 32)
    np.testing.assert_array_equal(found, counts(values, 256))
    np.testing.assert_array_equal(overflowed, np.arange(34) > 31)
    np.testing.assert_array_equal(bits(dense)[:32], values[:32])


def test_widest_matrix_keeps_its_last_column():
    values = np.zeros((2, 65536), np.uint16)
    values[1, [0, 65535]] = 0x3F80
    *_, dense = pack_and_unpack(from_bits(values, "bfloat16"))
    np.testing.assert_array_equal(bits(dense), values)


def test_is_a_pytree_of_one_array():
    packed, *_ = pack_and_unpack(np.ones((4, 13), np.float16), tile=8, compression=1)
    (leaf,), structure = jax.tree.flatten(packed)
    assert leaf is packed.packed
    assert jax.tree.unflatten(structure, [leaf]) == packed
    assert hash(structure) == hash(jax.tree.structure(packed))
    moved = jax.jit(lambda p: p)(packed)
    assert (moved.columns, moved.dtype, moved.tile, moved.compression) == (13, "float16", 8, 1)


def test_vmap():
    values = seeds.rng().integers(0, 2**16, (3, 5, 20)).astype(np.uint16)
    values *= seeds.rng().random(values.shape) < 0.3
    geometry = {"tile": 8, "compression": 1}
    *_, dense = jax.vmap(lambda d: pack_and_unpack(d, **geometry))(from_bits(values, "bfloat16"))
    np.testing.assert_array_equal(bits(dense), values)


@pytest.mark.parametrize(
    ("shape", "dtype", "geometry", "message"),
    [
        ((2, 8), "float32", {}, "bfloat16 or float16.*float32"),
        ((8,), "bfloat16", {}, r"\[M, H\], got bfloat16 \[8\]"),
        ((2, 0), "bfloat16", {}, "columns, got 0"),
        ((1, 65537), "bfloat16", {}, "65536 columns, got 65537"),
        ((2, 8), "bfloat16", {"tile": 8, "compression": 3}, "tile=8.*ression=3"),
        ((2, 8), "bfloat16", {"tile": 8, "compression": 8}, "two words"),
        ((2, 8), "bfloat16", {"tile": 8, "compression": 0}, "compression=0"),
        ((2, 8), "bfloat16", {"tile": 0, "compression": 1}, "tile=0"),
    ],
)
def test_what_cannot_be_packed_is_named(shape, dtype, geometry, message):
    with pytest.raises(ValueError, match=message):
        pack(jnp.ones(shape, dtype), **geometry)


@pytest.mark.parametrize(
    ("words", "columns", "dtype", "message"),
    [
        ("uint32", 40, "bfloat16", r"\[2, 3, 4\] for 40 columns.*got uint32 \[2, 1, 4\]"),
        ("int32", 16, "bfloat16", "uint32.*got int32"),
        ("uint32", 16, "float32", "got float32"),
    ],
)
def test_what_cannot_be_unpacked_is_named(words, columns, dtype, message):
    with pytest.raises(ValueError, match=message):
        unpack(TwELL(jnp.ones((2, 1, 4), words), columns, jnp.dtype(dtype), 16, 4))


@given(st.data())
def test_any_matrix_round_trips_through_tile_unions(data):
    bfloat16, float16 = DTYPES
    cases = [(1, 128, bfloat16), (256, 128, float16), (300, 256, bfloat16), (300, 256, float16)]
    m, h, dtype = data.draw(st.sampled_from(cases))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    matrix = rng.integers(0, 2**16, (m, h), np.uint16)
    matrix[rng.random((m, h)) < data.draw(st.sampled_from([0, 0.9, 1]))] = 0
    special = rng.random((m, h)) < 0.1
    matrix[special] = rng.choice(SPECIAL, special.sum())
    nnz, sizes, dense = unions_and_back(from_bits(matrix, dtype))
    np.testing.assert_array_equal(bits(dense), matrix)
    np.testing.assert_array_equal(nnz, np.count_nonzero(matrix, axis=1))
    tiles = np.pad(matrix, ((0, -m % 256), (0, 0))).reshape(-1, 256, h)
    np.testing.assert_array_equal(sizes, tiles.any(axis=1).sum(axis=1))


@pytest.mark.parametrize(
    ("shape", "dtype", "message"),
    [
        ((4, 100), "bfloat16", r"H a multiple of 128.*\[4, 100\]"),
        ((4, 128), "float32", r"bfloat16 or float16.*float32"),
        ((128,), "bfloat16", r"\[M, H\].*\[128\]"),
    ],
)
def test_what_has_no_tile_unions_is_named(shape, dtype, message):
    with pytest.raises(ValueError, match=message):
        pack_unions(jnp.zeros(shape, dtype))

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.layouts import twell
from tests import seeds

DTYPES = [jnp.bfloat16, jnp.float16]

pack = jax.jit(twell.pack, static_argnames=("tile", "compression"))
overflowed = jax.jit(twell.overflowed)
unpack = jax.jit(twell.unpack, static_argnums=(1, 2), static_argnames=("tile", "compression"))


def from_bits(bits, dtype):
    return bits.view(dtype)


def to_bits(g):
    return np.asarray(g).view(np.uint16)


def sparse_bits(m, h, density):
    """16-bit patterns of every kind (negative, subnormal, inf, NaN), most of them zero."""
    rng = seeds.rng()
    kept = rng.random((m, h)) < np.broadcast_to(density, (m, 1))
    return rng.integers(1, 1 << 16, (m, h), dtype=np.uint16) * kept


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("m", "h", "tile", "compression", "dtype"),
    [
        (1, 1, 256, 8, jnp.float16),
        (7, 128, 256, 8, jnp.bfloat16),
        (65, 384, 256, 8, jnp.float16),
        (33, 1000, 128, 4, jnp.bfloat16),
        (3, 65536, 256, 8, jnp.float16),
    ],
)
def test_unpack_restores_every_bit_of_rows_that_fit(m, h, tile, compression, dtype):
    bits = sparse_bits(m, h, np.linspace(0, 0.05, m)[:, None])
    packed = pack(from_bits(bits, dtype), tile=tile, compression=compression)
    assert packed.shape == twell.packed_shape(m, h, tile=tile, compression=compression)
    assert not np.any(overflowed(packed))
    dense = unpack(packed, h, dtype, tile=tile, compression=compression)
    np.testing.assert_array_equal(to_bits(dense), bits)


def test_entries_are_in_ascending_column_order_after_the_count():
    bits = np.zeros((1, 600), np.uint16)
    columns = [3, 200, 255, 256, 599]
    bits[0, columns] = [1, 0x8000, 0x3F80, 0x7FC0, 2]
    packed = np.asarray(pack(from_bits(bits, jnp.bfloat16)))
    expected = np.zeros((1, 3, 32), np.uint32)
    expected[0, :, 0] = 3, 1, 1
    expected[0, 0, 1:4] = 3 | 1 << 16, 200 | 0x8000 << 16, 255 | 0x3F80 << 16
    expected[0, 1, 1] = 256 | 0x7FC0 << 16
    expected[0, 2, 1] = 599 | 2 << 16
    np.testing.assert_array_equal(packed, expected)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_row_is_heavy_from_32_entries_in_a_tile_on(dtype):
    entries = np.array([0, 30, 31, 32, 256])
    bits = np.zeros((5, 512), np.uint16)
    for row, n in enumerate(entries):
        bits[row, 256 : 256 + n] = 0x3C00 + np.arange(n)
    packed = pack(from_bits(bits, dtype))
    np.testing.assert_array_equal(np.asarray(packed)[:, 1, 0], entries)
    np.testing.assert_array_equal(overflowed(packed), entries > 31)
    dense = np.asarray(unpack(packed, 512, dtype))
    np.testing.assert_array_equal(to_bits(dense)[:3], bits[:3])
    assert np.isnan(dense[3:]).all()


def test_a_row_is_heavy_from_129_entries_on():
    entries = np.array([0, 127, 128, 129])
    bits = np.zeros((4, 1290), np.uint16)
    for row, n in enumerate(entries):
        bits[row, 10 * np.arange(n)] = 1  # at most 26 in a tile
    packed = pack(from_bits(bits, jnp.bfloat16))
    assert not np.any(overflowed(packed))
    np.testing.assert_array_equal(twell.is_heavy(packed), entries > 128)


def test_unpack_ignores_words_past_the_count():
    bits = sparse_bits(20, 300, 0.05)
    packed = np.asarray(pack(from_bits(bits, jnp.bfloat16)))
    past = np.arange(32) > packed[..., :1]
    packed = np.where(past, seeds.rng().integers(2**32, size=packed.shape, dtype=np.uint32), packed)
    np.testing.assert_array_equal(to_bits(unpack(packed, 300, jnp.bfloat16)), bits)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: twell.pack(jnp.zeros((2, 256), jnp.float32)), "float32"),
        (lambda: twell.pack(jnp.zeros((256,), jnp.bfloat16)), r"\[256\]"),
        (lambda: twell.packed_shape(1, 65537), "65537"),
        (lambda: twell.packed_shape(1, 256, tile=100, compression=8), "tile=100"),
        (lambda: twell.packed_shape(1, 256, tile=8, compression=8), "tile=8"),
        (
            lambda: twell.unpack(jnp.zeros((2, 1, 32), jnp.uint32), 257, jnp.bfloat16),
            r"\[2, 2, 32\]",
        ),
        (lambda: twell.unpack(jnp.zeros((2, 1, 32), jnp.int32), 256, jnp.bfloat16), "int32"),
        (lambda: twell.unpack(jnp.zeros((2, 1, 32), jnp.uint32), 256, jnp.float32), "float32"),
    ],
)
def test_bad_input_is_named(call, message):
    with pytest.raises(ValueError, match=message):
        call()

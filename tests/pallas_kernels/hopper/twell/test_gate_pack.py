import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.common import lanes, matmul
from pallas_kernels.hopper.twell import gate_pack as gate
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import E4M3, Quantised
from pallas_kernels.rectifiers import RELU
from tests import seeds
from tests.pallas_kernels import gates
from tests.pallas_kernels.eight_bits import in_float64, scaled, shapes
from tests.pallas_kernels.rectified import ABOVE_TWO, EVERYTHING, SQUARED, gate_of

gate_pack = jax.jit(gate.gate_pack, static_argnums=2)
DTYPES = [jnp.bfloat16, jnp.float16]
CAPACITY = twell.TILE // twell.COMPRESSION - 1


def draw(m, d, h, density, dtype):
    """x, w_gate and the gate, as of `gates.draw`; in 8 bits with scales."""
    x, w = gates.draw(m, d, h, density, dtype)
    if dtype == E4M3:
        x, w = scaled(x, w)
    return x, w, dense_gate(x, w)


def dense_gate(x, w, act=RELU):
    dtype = jnp.bfloat16 if isinstance(x, Quantised) else x.dtype
    with np.errstate(invalid="ignore", over="ignore"):
        z = (in_float64(x) @ in_float64(w).T).astype(np.float32).astype(dtype)
        return gate_of(act, z.astype(np.float32), dtype).astype(dtype)


def assert_packs(packed, g):
    """Every word that the format specifies agrees with the dense `g`."""
    packed, (m, h) = np.asarray(packed), g.shape
    assert packed.shape == twell.packed_shape(m, h)
    tiles = np.pad(g != 0, ((0, 0), (0, -h % twell.TILE))).reshape(m, -1, twell.TILE)
    np.testing.assert_array_equal(packed[..., 0], np.sum(tiles, axis=-1))
    row, tile, word = np.nonzero(np.arange(1, CAPACITY + 1) <= packed[..., :1])
    entry = packed[row, tile, word + 1]
    column, value = entry & 0xFFFF, (entry >> 16).astype(np.uint16).view(g.dtype)
    np.testing.assert_array_equal(column // twell.TILE, tile)
    np.testing.assert_array_equal(value.astype(np.float32), g[row, column].astype(np.float32))
    assert len(np.unique(row * h + column)) == len(row)


@pytest.mark.parametrize(
    ("m", "d", "h", "dtype", "act"),
    [
        (1, 128, 128, jnp.bfloat16, RELU),
        (63, 192, 384, jnp.float16, EVERYTHING),
        (1000, 8192, 5632, jnp.bfloat16, RELU),
        (1000, 8192, 5632, jnp.float16, RELU),
        (65, 512, 65536, jnp.bfloat16, EVERYTHING),
        (16384, 2048, 5632, jnp.bfloat16, RELU),
        (16384, 2048, 5632, jnp.float16, RELU),
    ],
)
def test_lowers_without_a_gpu(lower, m, d, h, dtype, act):
    x, w = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((h, d), dtype)
    text = lower(functools.partial(gate.gate_pack, rectifier=act), x, w)
    kind = {jnp.bfloat16: "bf16x2", jnp.float16: "f16x2"}[dtype]
    assert "mosaic_gpu" in text and (f"set.gtu.u32.{kind}" in text) == (act is EVERYTHING)


def test_8_bits_lower_without_a_gpu(lower):
    x, w = (shapes(rows, 2048) for rows in (1000, 5632))
    text = lower(functools.partial(gate.gate_pack, dtype=jnp.float16), x, w)
    assert "m64n256k32.f32.e4m3.e4m3" in text


@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_compared_with_a_threshold_has_16_bits(dtype):
    rng = seeds.rng()
    finite = np.arange(int(np.array(np.inf, dtype).view(np.uint16)), dtype=np.uint16).view(dtype)
    finite = finite.astype(np.float32)  # all that are not negative
    between = rng.uniform(finite[:-1], finite[1:])
    some = rng.integers(len(between), size=200)
    for threshold in (*between[some], *finite[1:][some], 1e-60, 0.01, 1e30, 1e300):
        bits = lanes._largest_at_most(threshold, jnp.dtype(dtype))
        above = np.arange(len(finite)) > bits
        limit = np.float32(min(threshold, float(np.finfo(np.float32).max)))
        np.testing.assert_array_equal(above, finite > limit)


@pytest.mark.parametrize("dtype", [*DTYPES, E4M3])
def test_reference_packs_the_dense_gate(dtype):
    x, w, g = draw(33, 192, 384, 0.04, dtype)
    packed = jax.jit(functools.partial(REFERENCE.gate_pack, dtype=g.dtype))(x, w)
    assert_packs(packed, g)
    unpack = jax.jit(twell.unpack, static_argnums=(1, 2))
    np.testing.assert_array_equal(unpack(packed, 384, g.dtype), g)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "d", "h", "dtype"),
    [(1, 128, 128, jnp.bfloat16), (130, 320, 384, jnp.bfloat16), (70, 256, 384, E4M3)],
)
def test_pipeline_in_the_interpreter(m, d, h, dtype, interpreted):
    x, w, g = draw(m, d, h, 0.1, dtype)
    x = jax.tree.map(lambda a: a.at[0].set(jnp.nan), x)
    g = np.concatenate([np.full((1, h), np.nan, g.dtype), g[1:]])
    with interpreted(sms=1):
        assert_packs(gate.gate_pack(x, w, dtype=g.dtype), g)


def test_bad_number_of_stages_is_named():
    with pytest.raises(ValueError, match="stages must be at least 3, got 2"):
        matmul.Schedule(stages=2)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("density", [0.005, 0.12, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"),
    [
        (1, 128, 128),
        (7, 192, 384),
        (63, 512, 5632),
        (65, 8192, 128),
        (129, 128, 65536),
        (1000, 2048, 5632),
    ],
)
def test_every_bit_on_the_gpu(m, d, h, density, dtype):
    x, w, g = draw(m, d, h, density, dtype)
    packed = gate_pack(x, w)
    assert_packs(packed, g)
    fits = ~np.asarray(twell.overflowed(packed))
    dense = np.asarray(twell.unpack(packed, h, dtype))
    np.testing.assert_array_equal(dense[fits], g[fits])


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.005, 0.12, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"), [(1, 128, 128), (65, 8192, 128), (129, 384, 384), (1000, 2048, 5632)]
)
def test_every_bit_of_8_bit_products_on_the_gpu(m, d, h, density):
    x, w, g = draw(m, d, h, density, E4M3)
    assert_packs(jax.jit(functools.partial(gate.gate_pack, dtype=g.dtype))(x, w), g)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_at_and_over_capacity_on_the_gpu(dtype):
    # Row r of the gate is column r of w: r entries in each tile, in a random place.
    rng = seeds.rng()
    w = np.zeros((640, 512))
    for r in range(257):
        for first in (0, 256, 512):
            n = min(r, 640 - first)
            w[first + rng.permutation(min(256, 640 - first))[:n], r] = rng.integers(1, 100, n)
    x, w = jnp.eye(257, 512, dtype=dtype), jnp.asarray(w, dtype)
    packed = gate_pack(x, w)
    assert_packs(packed, dense_gate(x, w))
    np.testing.assert_array_equal(twell.overflowed(packed), np.arange(257) > CAPACITY)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO])
def test_nan_inf_and_signed_zero_on_the_gpu(act, dtype):
    x, w = gates.with_odd_values(*gates.draw(70, 192, 384, 0.01, dtype), infinite_row=66)
    assert_packs(gate_pack(x, w, act), dense_gate(x, w, act))

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import lanes, matmul
from pallas_kernels.hopper.twell import gate_pack as gate
from pallas_kernels.hopper.twell import pack_relu
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import E4M3, Quantised
from pallas_kernels.rectifiers import RELU
from tests import seeds
from tests.pallas_kernels.eight_bits import in_float64, scaled, shapes
from tests.pallas_kernels.rectified import ABOVE_TWO, EVERYTHING, SQUARED, gate_of

gate_pack = jax.jit(gate.gate_pack, static_argnums=2)
DTYPES = [jnp.bfloat16, jnp.float16]
CAPACITY = twell.TILE // twell.COMPRESSION - 1


def draw(m, d, h, density, dtype):
    """x, w_gate and relu(x @ w_gate^T) with about `density` non-zeros.

    Small integers: every order of summation gives the same float32, so results agree to the bit.
    """
    rng = seeds.rng()
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((m, d), (h, d)))
    x[:, -1], w[:, -1] = 1, 0
    w[:, -1] = -np.clip(np.quantile(x @ w.T, 1 - density), -448, 448)
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
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


def pack_relu_reference(acc, dtype, tile, packed_ref, rectifier):
    """What `pack_relu` does, for the interpreter."""
    packed = twell.pack(rectifier.gate(acc, dtype).astype(dtype))[:, 0]
    word = jnp.arange(packed.shape[1])
    is_entry = (word > 0) & (word <= packed[:, :1])
    packed_ref[...] = packed + jnp.where(is_entry, twell.TILE * tile, 0).astype(jnp.uint32)


@pytest.mark.parametrize(
    ("m", "d", "h", "dtype"),
    [(1, 128, 128, jnp.bfloat16), (130, 320, 384, jnp.bfloat16), (70, 256, 384, E4M3)],
)
def test_pipeline_in_the_interpreter(m, d, h, dtype, monkeypatch, capsys):
    monkeypatch.setattr(pack_relu, "pack_relu", pack_relu_reference)
    monkeypatch.setattr(matmul, "sm_count", lambda: 1)
    x, w, g = draw(m, d, h, 0.1, dtype)
    x = jax.tree.map(lambda a: a.at[0].set(jnp.nan), x)
    g = np.concatenate([np.full((1, h), np.nan, g.dtype), g[1:]])
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        assert_packs(gate.gate_pack(x, w, dtype=g.dtype), g)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((4, 128), (128, 192), r"x must be .*\[4, 192\].*\[4, 128\]"),
        ((4, 96), (128, 96), r"D a multiple of 64.*\[128, 96\]"),
        ((4, 8256), (128, 8256), r"D a multiple of 64 from 128 to 8192.*\[128, 8256\]"),
        ((4, 128), (192, 128), r"H a multiple of 128.*\[192, 128\]"),
        ((4, 128), (65536 + 128, 128), r"H a multiple of 128 up to 65536.*\[65664, 128\]"),
        ((0, 128), (128, 128), r"x must be .*at least one row.*\[0, 128\]"),
        ((4, 4, 128), (128, 128), r"x must be .*\[4, 4, 128\]"),
    ],
)
def test_bad_shape_is_named(x, w, message):
    with pytest.raises(ValueError, match=message):
        gate.gate_pack(jnp.zeros(x, jnp.bfloat16), jnp.zeros(w, jnp.bfloat16))


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        (jnp.float32, jnp.float32, "w_gate must be a bfloat16 or float16 .* got float32"),
        (jnp.bfloat16, jnp.float16, "x must be float16 .* got bfloat16"),
        (jnp.int16, jnp.int16, "w_gate must be a bfloat16 or float16 .* got int16"),
    ],
)
def test_bad_dtype_is_named(x, w, message):
    with pytest.raises(ValueError, match=message):
        gate.gate_pack(jnp.zeros((4, 128), x), jnp.zeros((128, 128), w))


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
    x, w, _ = draw(70, 192, 384, 0.01, dtype)
    x = x.at[3].set(jnp.nan).at[5, 7].set(jnp.inf).at[66, 9].set(-jnp.inf).at[68].set(-0.0)
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x, w = x.at[10].set(0).at[10, 0].set(tiny), w.at[4, 0].set(1).at[200:204, 0].set(-0.25)
    assert_packs(gate_pack(x, w, act), dense_gate(x, w, act))

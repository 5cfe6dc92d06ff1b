import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import matmul
from pallas_kernels.hopper.unions import gate_union, union_relu
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, OUTLYING_ABOVE, TILE_TOKENS
from pallas_kernels.quantised import E4M3, Quantised, rounded
from pallas_kernels.rectifiers import RELU
from tests import seeds
from tests.pallas_kernels.eight_bits import scaled, shapes
from tests.pallas_kernels.rectified import ABOVE_TWO, SQUARED, gate_of

DTYPES = [jnp.bfloat16, jnp.float16]


def draw(m, d, h, density, dtype):
    """x and w_gate whose relu(x @ w_gate^T) has about `density` non-zeros; one token fires most.

    Small integers: every order of summation gives the same float32, so results agree to the bit.
    """
    rng = seeds.rng()
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((m, d), (h, d)))
    x[:, -1], w[:, -1] = 1, 0
    w[:, -1] = -np.clip(np.quantile(x @ w.T, 1 - density), 1, 448)
    x[rng.integers(m), -1] = -4
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def assert_unions(out, x, w, act=RELU, live=None):
    """Every bit that the format specifies agrees with the product in float32, with zeros from
    neuron `live` on."""
    dtype, factors = x.dtype, None
    if isinstance(x, Quantised):
        dtype, factors = jnp.bfloat16, np.asarray(x.scale) * np.asarray(w.scale).T
        x, w = x.values, w.values
    with np.errstate(invalid="ignore"):
        z = np.asarray(x, np.float32) @ np.asarray(w, np.float32).T
    if factors is not None:
        z *= factors
    if live is not None:
        z[:, live:] = 0
    gate, masks, counts = jax.device_get(out)
    # By NumPy: XLA keeps more bits than `dtype` has on a GPU, and no subnormal numbers on a CPU.
    with np.errstate(over="ignore"):
        g = gate_of(act, z.astype(dtype).astype(np.float32), dtype).astype(dtype)
    is_finite = np.isfinite(z[:, ::GROUP_NEURONS])
    expected = jax.device_get(tile_union.describe(jnp.asarray(g), jnp.asarray(is_finite)))
    np.testing.assert_array_equal(masks, expected[1])
    np.testing.assert_array_equal(counts, expected[2])
    used = np.unpackbits(masks[0].view(np.uint8), axis=-1, bitorder="little").astype(bool)
    assert gate.shape == expected[0].shape and gate.dtype == dtype
    np.testing.assert_array_equal(
        gate[used].astype(np.float32), expected[0][used].astype(np.float32)
    )


@pytest.mark.parametrize(
    ("m", "d", "h", "dtype", "act", "instruction"),
    [
        (1, 128, 128, jnp.float16, RELU, "cvt.rn.relu.f16x2"),
        (1000, 8192, 5632, jnp.bfloat16, RELU, "cvt.rn.relu.bf16x2"),
        (65, 512, 65536, jnp.bfloat16, SQUARED, "mul.rn.bf16x2"),
        (16384, 2048, 5632, jnp.bfloat16, ABOVE_TWO, "set.gtu.u32.bf16x2"),
        (16384, 2048, 5632, jnp.float16, ABOVE_TWO, "set.gtu.u32.f16x2"),
    ],
)
def test_lowers_without_a_gpu(lower, m, d, h, dtype, act, instruction):
    x, w = jax.ShapeDtypeStruct((m, d), dtype), jax.ShapeDtypeStruct((h, d), dtype)
    text = lower(functools.partial(gate_union.gate_union, rectifier=act), x, w)
    assert "mosaic_gpu" in text and instruction in text


def test_8_bits_lower_without_a_gpu(lower):
    x, w = (shapes(rows, 2048) for rows in (1000, 5632))
    text = lower(functools.partial(gate_union.gate_union, dtype=jnp.float16), x, w)
    assert "m64n256k32.f32.e4m3.e4m3" in text and "cvt.rn.relu.f16x2" in text


def union_relu_reference(
    acc, gate_ref, used_ref, usual_ref, counts_ref, words_ref, *, rectifier, threshold
):
    """What `union_relu` does, for the interpreter."""
    assert threshold == OUTLYING_ABOVE
    # 64 neurons that never fire pad H to the multiple of 128 that `pack` takes.
    z = jnp.pad(acc.T, ((0, 0), (0, 128 - GROUP_NEURONS)), constant_values=-1)
    gate, masks, counts = tile_union.pack(z, gate_ref.dtype, rectifier)
    gate_ref[...] = gate[0, :GROUP_NEURONS]
    used_ref[...], usual_ref[...] = masks[:, 0, :2]
    counts_ref[...] = counts[0]


@pytest.mark.parametrize(("m", "d", "h"), [(1, 128, 128), (300, 320, 384)])
def test_pipeline_in_the_interpreter(m, d, h, monkeypatch, capsys):
    monkeypatch.setattr(union_relu, "union_relu", union_relu_reference)
    monkeypatch.setattr(matmul, "sm_count", lambda: 1)
    x, w = draw(m, d, h, 0.1, jnp.bfloat16)
    x = x.at[m // 2].set(jnp.nan)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        assert_unions(gate_union.gate_union(x, w), x, w)
    assert "RACE" not in capsys.readouterr().out


def test_8_bits_in_the_interpreter(monkeypatch, capsys):
    monkeypatch.setattr(union_relu, "union_relu", union_relu_reference)
    monkeypatch.setattr(matmul, "sm_count", lambda: 1)
    x, w = draw(300, 384, 384, 0.1, E4M3)
    x, w = scaled(x.at[150].set(jnp.nan), w)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams(detect_races=True)):
        assert_unions(gate_union.gate_union(x, w, dtype=jnp.bfloat16), x, w)
    assert "RACE" not in capsys.readouterr().out


@pytest.mark.parametrize(
    ("x", "w", "message"),
    [
        ((4, 128), (128, 192), r"x must be .*\[4, 192\].*\[4, 128\]"),
        ((4, 128), (192, 128), r"H a multiple of 128.*\[192, 128\]"),
        ((0, 128), (128, 128), r"x must be .*at least one row.*\[0, 128\]"),
    ],
)
def test_bad_shape_is_named(x, w, message):
    with pytest.raises(ValueError, match=message):
        gate_union.gate_union(jnp.zeros(x, jnp.bfloat16), jnp.zeros(w, jnp.bfloat16))


def test_bad_8_bit_operands_are_named():
    x, w = (jnp.ones((n, 128), jnp.bfloat16) for n in (4, 256))
    x8, w8 = rounded(x), rounded(w)
    with pytest.raises(ValueError, match="x and the weight must both be Quantised, or neither"):
        gate_union.gate_union(x, w8)
    with pytest.raises(ValueError, match=r"w_gate.scale must be float32 \[256, 1\]"):
        gate_union.gate_union(x8, rounded(w, -2), dtype=x.dtype)
    with pytest.raises(ValueError, match="must be bfloat16 or float16, got float8_e4m3fn"):
        gate_union.gate_union(x8, w8)
    x8, w8 = (rounded(jnp.ones((n, 192), jnp.bfloat16)) for n in (4, 256))
    with pytest.raises(ValueError, match=r"w_gate must have D a multiple of 128, got \[256, 192\]"):
        gate_union.gate_union(x8, w8, dtype=x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO])
@pytest.mark.parametrize("density", [0.005, 0.25, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"), [(1, 128, 128), (257, 192, 384), (65, 8192, 128), (1000, 2048, 5632)]
)
def test_every_bit_on_the_gpu(m, d, h, density, act, dtype):
    x, w = draw(m, d, h, density, dtype)
    assert_unions(jax.jit(functools.partial(gate_union.gate_union, rectifier=act))(x, w), x, w, act)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.005, 0.25, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"), [(1, 128, 128), (257, 384, 384), (65, 8192, 128), (1000, 2048, 5632)]
)
def test_every_bit_of_8_bit_products_on_the_gpu(m, d, h, density):
    x, w = scaled(*draw(m, d, h, density, E4M3))
    assert_unions(jax.jit(functools.partial(gate_union.gate_union, dtype=jnp.bfloat16))(x, w), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_around_the_threshold_on_the_gpu(dtype):
    # In tile n one token fires n neurons of each group, so the masks say whether it is outlying.
    rng = seeds.rng()
    tiles = GROUP_NEURONS + 1
    x, w = np.zeros((tiles * TILE_TOKENS, 128)), np.zeros((384, 128))
    for n in range(tiles):
        x[n * TILE_TOKENS + rng.integers(TILE_TOKENS), n] = 1
        for first in range(0, 384, GROUP_NEURONS):
            w[first + rng.permutation(GROUP_NEURONS)[:n], n] = rng.integers(1, 100, n)
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    assert_unions(jax.jit(gate_union.gate_union)(x, w), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO])
def test_nan_inf_and_signed_zero_on_the_gpu(act, dtype):
    x, w = draw(TILE_TOKENS + 70, 192, 384, 0.01, dtype)
    x = x.at[3].set(jnp.nan).at[5, 7].set(jnp.inf).at[266, 9].set(-jnp.inf).at[68].set(-0.0)
    tiny = float(jnp.finfo(dtype).smallest_subnormal)
    x, w = x.at[10].set(0).at[10, 0].set(tiny), w.at[4, 0].set(1).at[200:204, 0].set(-0.25)
    assert_unions(jax.jit(functools.partial(gate_union.gate_union, rectifier=act))(x, w), x, w, act)

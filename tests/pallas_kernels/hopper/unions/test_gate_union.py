import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, OUTLYING_ABOVE, TILE_TOKENS
from pallas_kernels.quantised import E4M3, Quantised, rounded
from pallas_kernels.rectifiers import RELU
from tests import seeds
from tests.pallas_kernels import gates
from tests.pallas_kernels.eight_bits import scaled, shapes
from tests.pallas_kernels.rectified import ABOVE_TWO, SQUARED, gate_of
from tests.poisoned import on_poisoned_memory

DTYPES = [jnp.bfloat16, jnp.float16]


gate_union = jax.jit(HOPPER.gate_union, static_argnames=("rectifier", "dtype"))


def draw(m, d, h, density, dtype):
    """x and w_gate; for one token most neurons are active."""
    x, w = gates.draw(m, d, h, density, dtype, least=1)
    return x.at[seeds.rng().integers(m), -1].set(-4), w


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
    tiles, h = -(-len(g) // TILE_TOKENS), g.shape[1]
    padding = (0, tiles * TILE_TOKENS - len(g)), (0, 0)
    dense = np.pad(g, padding).reshape(tiles, TILE_TOKENS, h)
    active = (dense != 0).reshape(tiles, TILE_TOKENS, -1, GROUP_NEURONS)
    in_group = active.sum(axis=3)
    is_infinite = np.pad(~np.isfinite(z[:, ::GROUP_NEURONS]), padding).reshape(in_group.shape)
    expected = in_group + 128 * is_infinite
    np.testing.assert_array_equal(counts, expected.reshape(-1, h // GROUP_NEURONS).T)
    is_usual = (expected <= OUTLYING_ABOVE)[..., None]
    used, usual = (a.any(axis=1).reshape(tiles, h) for a in (active, active & is_usual))
    bits = np.unpackbits(masks.view(np.uint8), axis=-1, bitorder="little")
    np.testing.assert_array_equal(bits, [used, usual])
    assert gate.shape == (tiles, h, TILE_TOKENS) and gate.dtype == dtype
    expected = dense.transpose(0, 2, 1)[used]
    np.testing.assert_array_equal(gate[used].astype(np.float32), expected.astype(np.float32))


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
    text = lower(functools.partial(HOPPER.gate_union, rectifier=act), x, w)
    assert "mosaic_gpu" in text and instruction in text


def test_8_bits_lower_without_a_gpu(lower):
    x, w = (shapes(rows, 2048) for rows in (1000, 5632))
    text = lower(functools.partial(HOPPER.gate_union, dtype=jnp.float16), x, w)
    assert "m64n256k32.f32.e4m3.e4m3" in text and "cvt.rn.relu.f16x2" in text


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("m", "d", "h"), [(1, 128, 128), (300, 320, 384)])
def test_pipeline_in_the_interpreter(m, d, h, interpreted):
    x, w = draw(m, d, h, 0.1, jnp.bfloat16)
    x = x.at[m // 2].set(jnp.nan)
    with interpreted(sms=1):
        assert_unions(HOPPER.gate_union(x, w), x, w)


def test_8_bits_in_the_interpreter(interpreted):
    x, w = draw(300, 384, 384, 0.1, E4M3)
    x, w = scaled(x.at[150].set(jnp.nan), w)
    with interpreted(sms=1):
        assert_unions(HOPPER.gate_union(x, w, dtype=jnp.bfloat16), x, w)


def of_live(kernels, x, w, live):
    return kernels.gate_union(x, w, live=jnp.full(1, live, jnp.int32))


@pytest.mark.sampled(1)
@pytest.mark.parametrize("live", [0, 1, 128, 129])
def test_only_live_neurons_are_read_in_the_interpreter(live, interpreted):
    x, w = draw(300, 64 * 3, 384, 0.1, jnp.bfloat16)
    with interpreted(sms=2):
        out = of_live(HOPPER, x, w.at[live:].set(jnp.nan), live)
    assert_unions(out, x, w, live=live)


def test_the_reference_reads_live_neurons_only():
    x, w = draw(300, 128, 256, 0.1, jnp.bfloat16)
    assert_unions(of_live(REFERENCE, x, w.at[70:].set(jnp.nan), 70), x, w, live=70)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "d", "h"), [(1, 128, 128), (257, 192, 384), (1000, 2048, 5632)])
def test_only_live_neurons_are_read_on_the_gpu(m, d, h, dtype):
    x, w = draw(m, d, h, 0.05, dtype)
    x = x.at[m // 2, 3].set(jnp.inf)
    for live in (0, 1, 63, 64, 127, 128, h // 2 + 5, h - 1, h, h + 300):
        call = functools.partial(of_live, HOPPER)
        out = on_poisoned_memory(call, x, w.at[live:].set(jnp.nan), live)
        assert_unions(out, x, w, live=live)


def test_a_number_of_live_neurons_lowers_without_a_gpu(lower):
    x, w = (jax.ShapeDtypeStruct((n, 2048), jnp.bfloat16) for n in (1000, 5632))
    live = jax.ShapeDtypeStruct((), jnp.int32)
    assert "mosaic_gpu" in lower(functools.partial(of_live, HOPPER), x, w, live)


def test_bad_8_bit_operands_are_named():
    x, w = (jnp.ones((n, 128), jnp.bfloat16) for n in (4, 256))
    x8, w8 = rounded(x), rounded(w)
    with pytest.raises(ValueError, match="x and the weight must both be Quantised, or neither"):
        HOPPER.gate_union(x, w8)
    with pytest.raises(ValueError, match=r"w_gate.scale must be float32 \[256, 1\]"):
        HOPPER.gate_union(x8, rounded(w, -2), dtype=x.dtype)
    with pytest.raises(ValueError, match="must be bfloat16 or float16, got float8_e4m3fn"):
        HOPPER.gate_union(x8, w8)
    x8, w8 = (rounded(jnp.ones((n, 192), jnp.bfloat16)) for n in (4, 256))
    with pytest.raises(ValueError, match=r"w_gate must have D a multiple of 128, got \[256, 192\]"):
        HOPPER.gate_union(x8, w8, dtype=x.dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO])
@pytest.mark.parametrize("density", [0.005, 0.25, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"), [(1, 128, 128), (257, 192, 384), (65, 8192, 128), (1000, 2048, 5632)]
)
def test_every_bit_on_the_gpu(m, d, h, density, act, dtype):
    x, w = draw(m, d, h, density, dtype)
    assert_unions(gate_union(x, w, rectifier=act), x, w, act)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.005, 0.25, 1])
@pytest.mark.parametrize(
    ("m", "d", "h"), [(1, 128, 128), (257, 384, 384), (65, 8192, 128), (1000, 2048, 5632)]
)
def test_every_bit_of_8_bit_products_on_the_gpu(m, d, h, density):
    x, w = scaled(*draw(m, d, h, density, E4M3))
    assert_unions(gate_union(x, w, dtype=jnp.bfloat16), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_tokens_around_the_threshold_on_the_gpu(dtype):
    # In tile n one token has n active neurons in each group, so masks say whether it is outlying.
    rng = seeds.rng()
    tiles = GROUP_NEURONS + 1
    x, w = np.zeros((tiles * TILE_TOKENS, 128)), np.zeros((384, 128))
    for n in range(tiles):
        x[n * TILE_TOKENS + rng.integers(TILE_TOKENS), n] = 1
        for first in range(0, 384, GROUP_NEURONS):
            w[first + rng.permutation(GROUP_NEURONS)[:n], n] = rng.integers(1, 100, n)
    x, w = jnp.asarray(x, dtype), jnp.asarray(w, dtype)
    assert_unions(gate_union(x, w), x, w)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("act", [RELU, SQUARED, ABOVE_TWO])
def test_nan_inf_and_signed_zero_on_the_gpu(act, dtype):
    x, w = draw(TILE_TOKENS + 70, 192, 384, 0.01, dtype)
    x, w = gates.with_odd_values(x, w, infinite_row=266)
    assert_unions(gate_union(x, w, rectifier=act), x, w, act)

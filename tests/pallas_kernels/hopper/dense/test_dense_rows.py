import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.kernels import HOPPER, REFERENCE
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.quantised import Quantised, for_product, rounded, tokens
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import Weights
from tests import seeds
from tests.back_ends import BACK_ENDS
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.eight_bits import in_float64, lost
from tests.pallas_kernels.rectified import EVERYTHING, SQUARED, gate_of, linear_of

CASES = [  # M, D, H, number of listed rows
    (1, 128, 128, 1),
    (70, 192, 256, 0),
    (70, 192, 256, 66),
    (200, 128, 384, 200),
    (129, 128, 640, 64),
    (70, 192, 256, 65),
]
KEPT = 128  # rows, fewer than some cases have


def draw(m, d, h, count, gated, dtype):
    """(heavy, weights, y); y and the rows of x that are not listed are NaN."""
    rng = seeds.rng()
    x_rows = np.full((-(-m // 8) * 8, d), np.nan)
    x_rows[:count] = rng.standard_normal((count, d))
    w_gate, w_up, w_down = (rng.standard_normal((h, d)) / d**0.5 for _ in range(3))
    rows = np.full(m, -1)
    rows[:count] = rng.permutation(m)[:count]
    y = np.full((m, d), np.nan)
    x_rows, w_gate, w_up, w_down, y = (a.astype(dtype) for a in (x_rows, w_gate, w_up, w_down, y))
    heavy = HeavyRows(np.full(1, count, np.int32), rows.astype(np.int32), x_rows)
    return heavy, Weights(w_gate if gated else None, w_up, w_down), y


def draw_8_bits(m, d, h, count, names):
    """`draw` with these weights in 8 bits; without one of the gate, the block is not gated."""
    heavy, weights, y = draw(m, d, h, count, "gate" in names, jnp.bfloat16)
    made = {name: jax.device_get(rounded(getattr(weights, name))) for name in names}
    weights = dataclasses.replace(weights, **made)
    with np.errstate(invalid="ignore"):
        x = jax.device_get(tokens(jnp.asarray(heavy.x), weights.inner))
    return dataclasses.replace(heavy, x=x), weights, y


def run(kernels, *operands, **options):
    """y, l1, fired and kept of a back end's `dense_rows` and `place_rows`."""
    return jitted(kernels, **options)(*operands)


def jitted(kernels, **options):
    def call(heavy, weights, y):
        y_rows, *stats = kernels.dense_rows(heavy, weights, **options)
        y_ref = jax.new_ref(y)
        kernels.place_rows(heavy.count, heavy.rows, y_rows, y_ref)
        return y_ref[...], *stats

    return jax.jit(call)


def assert_matches(out, heavy, weights, y, act=RELU):
    count, dtype = int(heavy.count[0]), y.dtype
    rows = np.asarray(heavy.rows)[:count]
    product, *second = (
        (in_float64(for_product(heavy.x, w)) @ in_float64(w).T)[:count] for w in weights.inner
    )
    gate = gate_of(act, product, dtype)
    h = gate * linear_of(act, second[0]) if second else gate
    y, l1, fired, kept = jax.device_get(out)
    assert y.dtype == dtype
    assert np.isnan(np.delete(np.asarray(y, np.float32), rows, axis=0)).all()
    in_8_bits = any(isinstance(w, Quantised) for w in weights.inner)
    bound = lost(y.shape[1]) if in_8_bits else 0
    size = np.sqrt(np.mean(np.square(product))) if count else 0
    margin = (1e-2 if act.threshold else 1e-4) + bound * size
    sure = (np.abs(product - act.threshold) > margin).all(axis=0)  # whatever the rounding
    np.testing.assert_array_equal(fired[sure], (gate > 0).any(axis=0)[sure])
    np.testing.assert_allclose(l1, np.abs(h).sum(), rtol=1e-2)
    if count:
        ref = h @ np.asarray(weights.down, np.float64)
        out = np.asarray(y, np.float64)[rows]
        assert relative_error(out, ref) < 3 * ROUNDING + bound  # of the gate, of h and of y
    for ours, ref in (
        zip(kept, [gate, h] if second else [gate], strict=True) if kept is not None else ()
    ):
        assert ours.shape == (KEPT, len(weights.down)) and ours.dtype == dtype
        if count:
            assert relative_error(ours[:count], ref[:KEPT]) < 2 * ROUNDING


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_reference(case, gated):
    operands = draw(*case, gated, jnp.bfloat16)
    assert_matches(run(REFERENCE, *operands, keep=KEPT), *operands)


def assert_places_on_a_residual(kernels, m, d, count, dtype):
    """Bits of each row, placed or not; nothing else may be read of any array."""
    rng = seeds.rng()
    rows = np.full(m, -1, np.int32)
    rows[:count] = rng.permutation(m)[:count]
    y_rows, residual = (np.full((m, d), np.nan, dtype) for _ in range(2))
    y_rows[:count], residual[rows[:count]] = rng.standard_normal((2, count, d))
    y = rng.standard_normal((m, d)).astype(dtype)

    @jax.jit
    def place(*operands):
        y_ref = jax.new_ref(y)
        kernels.place_rows(*operands[:3], y_ref, operands[3])
        return y_ref[...]

    out = place(np.full(1, count, np.int32), rows, y_rows, residual)
    y[rows[:count]] = y_rows[:count] + residual[rows[:count]]
    np.testing.assert_array_equal(*(np.asarray(a, np.float32) for a in (out, y)))


@pytest.mark.parametrize("count", [0, 5, 70])
def test_reference_places_on_a_residual(count):
    assert_places_on_a_residual(REFERENCE, 70, 192, count, jnp.bfloat16)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("m", "d", "count"), [(70, 192, 0), (70, 192, 70), (1000, 2048, 999), (9, 8192, 5)]
)
def test_on_the_gpu_places_on_a_residual(m, d, count, dtype):
    assert_places_on_a_residual(HOPPER, m, d, count, dtype)


EIGHT_BITS = [  # the lists are short and long
    ((70, 128, 256, 66), ["gate", "up"]),
    ((70, 256, 256, 9), ["gate"]),
    ((129, 128, 384, 64), ["up"]),
]


@pytest.mark.parametrize(("case", "names"), EIGHT_BITS)
def test_reference_with_8_bits(case, names):
    operands = draw_8_bits(*case, names)
    assert_matches(run(REFERENCE, *operands), *operands)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("case", "gated", "act"),
    [
        pytest.param(CASES[0], True, RELU, marks=pytest.mark.slow),
        pytest.param(CASES[1], True, RELU, marks=pytest.mark.slow),
        (CASES[2], True, EVERYTHING),
        pytest.param(CASES[3], False, RELU, marks=pytest.mark.slow),
        (CASES[5], False, SQUARED),  # CASES[4] is behind a kernel that still runs
    ],
)
def test_interpreted(interpreted, case, gated, act):
    operands = draw(*case, gated, jnp.bfloat16)
    with interpreted(sms=2):
        out = run(HOPPER, *operands, rectifier=act, keep=KEPT)
        assert_matches(out, *operands, act)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("case", "names"), [pytest.param(*EIGHT_BITS[0], marks=pytest.mark.slow), EIGHT_BITS[1]]
)
def test_8_bits_interpreted(interpreted, case, names):
    operands = draw_8_bits(*case, names)
    with interpreted(sms=2):
        assert_matches(run(HOPPER, *operands), *operands)


def assert_rows_keep_apart(kernels, case, dtype):
    """One row of x has a NaN, the next infinities: they reach their rows of y and no other."""
    *_, count = case
    clean, weights, y = draw(*case, True, dtype)
    x_rows = clean.x.copy()
    x_rows[count // 2, 3] = np.nan
    x_rows[count // 2 + 1, :2] = np.inf, -np.inf
    heavy = dataclasses.replace(clean, x=x_rows)
    rows, bad = clean.rows[:count], slice(count // 2, count // 2 + 2)
    expected, *_ = run(kernels, clean, weights, y)
    out, l1, fired, _ = run(kernels, heavy, weights, y)
    expected, out = (np.asarray(a, np.float32)[rows] for a in (expected, out))
    assert np.isnan(l1) and np.all(fired)
    assert np.isnan(out[bad]).all()
    np.testing.assert_array_equal(np.delete(out, bad, axis=0), np.delete(expected, bad, axis=0))


def test_reference_keeps_rows_apart():
    assert_rows_keep_apart(REFERENCE, CASES[2], jnp.bfloat16)


@pytest.mark.slow
def test_interpreted_behind_a_kernel_that_still_runs(interpreted):
    heavy, weights, y = draw(*CASES[4], True, jnp.bfloat16)
    pending = dataclasses.replace(heavy, pending=(np.zeros(3, np.float32), y))
    with interpreted(sms=2):
        assert_matches(run(HOPPER, pending, weights, y), heavy, weights, y)


@pytest.mark.slow
def test_interpreted_keeps_rows_apart(interpreted):
    with interpreted(sms=2):
        assert_rows_keep_apart(HOPPER, (70, 192, 256, 35), jnp.bfloat16)


def draw_live(case, live):
    """Operands with NaN in the weights of further neurons, and those without these neurons."""
    heavy, weights, y = draw(*case, True, jnp.bfloat16)
    poisoned = [w.copy() for w in weights.inner]
    for w in poisoned:
        w[live:] = np.nan
    cut = [np.where(np.arange(len(w))[:, None] < live, w, 0) for w in weights.inner]
    given = Weights(*poisoned, weights.down, np.full(1, live, np.int32))
    return (heavy, given, y), (heavy, Weights(*cut, weights.down), y)


@pytest.mark.slow
@pytest.mark.parametrize("live", [0, 65, pytest.param(128, marks=pytest.mark.slow)])
def test_only_live_neurons_are_read_in_the_interpreter(interpreted, live):
    given, expected = draw_live(CASES[2], live)
    with interpreted(sms=2):
        assert_matches(run(HOPPER, *given), *expected)


@pytest.mark.parametrize("case", [CASES[2], CASES[3]])
@pytest.mark.parametrize("kernels", BACK_ENDS)
def test_only_live_neurons_are_read(kernels, case):
    for live in (0, 1, 65, 128, 200):
        given, expected = draw_live(case, live)
        assert_matches(run(kernels, *given), *expected)


def test_a_number_of_live_neurons_lowers_without_a_gpu(lower):
    given, _ = draw_live(CASES[2], 7)
    assert "hidden_kernel" in lower(jitted(HOPPER), *given)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "gated", "dtype", "act"),
    [
        ((1, 128, 128), True, jnp.bfloat16, EVERYTHING),
        ((1, 128, 128), False, jnp.float16, SQUARED),
        ((1001, 2048, 5632), True, jnp.float16, RELU),
        ((65, 8192, 65536), True, jnp.bfloat16, RELU),
        ((65, 8192, 65536), False, jnp.bfloat16, RELU),
    ],
)
def test_lowers_without_a_gpu(lower, shape, gated, dtype, act):
    m, d, h = shape
    w, rows = jax.ShapeDtypeStruct((h, d), dtype), jax.ShapeDtypeStruct((m,), jnp.int32)
    x_rows = jax.ShapeDtypeStruct((-(-m // 8) * 8, d), dtype)
    one, y = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct((m, d), dtype)
    call = functools.partial(run, HOPPER, rectifier=act, keep=KEPT)
    text = lower(call, HeavyRows(one, rows, x_rows), Weights(w if gated else None, w, w), y)
    assert text.count("@mosaic_gpu") == 3 and "output_operand_alias" in text

    def place(*operands):
        y_ref = jax.new_ref(jnp.zeros_like(operands[3]))
        HOPPER.place_rows(*operands[:3], y_ref, operands[3])
        return y_ref[...]

    assert "output_operand_alias" in lower(place, one, rows, y, y)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("names", [["gate", "up"], ["gate"]])
def test_8_bits_lower_without_a_gpu(lower, names):
    operands = jax.tree.map(jnp.asarray, draw_8_bits(1, 128, 128, 1, names))
    text = lower(functools.partial(run, HOPPER), *operands)
    assert "n128k32.f32.e4m3.e4m3" in text and "n32k32.f32.e4m3.e4m3" in text
    assert ("n128k16.f32.bf16.bf16" in text.split("down_kernel")[0]) == (names == ["gate"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"count": np.zeros(2, jnp.int32)}, r"count must be int32 \[1\]"),
        ({"rows": np.zeros(70)}, r"rows must be int32 \[70\]"),
        ({"x": np.zeros((70, 192), jnp.bfloat16)}, r"heavy.x must be bfloat16 \[72, 192\]"),
        ({"up": np.zeros((192, 256), jnp.bfloat16)}, r"w_up must be bfloat16 \[256, 192\]"),
        ({"down": np.zeros((256, 192))}, "w_down must be a bfloat16"),
    ],
)
def test_bad_operands_are_named(change, message):
    heavy, weights, y = draw(*CASES[1], True, jnp.bfloat16)
    with pytest.raises(ValueError, match=message):
        run(HOPPER, with_changes(heavy, change), with_changes(weights, change), y)


def test_bad_place_of_rows_is_named():
    (one, rows), y_rows = (np.zeros(n, np.int32) for n in (1, 70)), np.zeros((128, 192))
    with pytest.raises(
        ValueError, match=r"y_ref must be float32 \[70, 192\].* got float32 \[70, 64"
    ):
        HOPPER.place_rows(one, rows, y_rows.astype(np.float32), jax.new_ref(jnp.zeros((70, 64))))
    with pytest.raises(ValueError, match=r"residual must be .*\[70, 192\].*\[70, 64"):
        y_ref, residual = jax.new_ref(jnp.zeros((70, 192))), np.zeros((70, 64), np.float32)
        HOPPER.place_rows(one, rows, y_rows.astype(np.float32), y_ref, residual)


def with_changes(operand, change):
    return dataclasses.replace(operand, **{k: v for k, v in change.items() if hasattr(operand, k)})


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize(
    "case",
    [
        *CASES,
        *((1000, 2048, 5632, count) for count in (0, 1, 7, 8, 63, 64, 65, 128, 129)),
        (1000, 768, 5632, 1000),
        (65, 128, 65536, 9),
        (7, 8192, 640, 5),
    ],
)
def test_on_the_gpu(case, gated, dtype):
    operands = draw(*case, gated, dtype)
    assert_matches(run(HOPPER, *operands, keep=KEPT), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("names", [["gate", "up"], ["gate"], ["up"]])
@pytest.mark.parametrize("count", [0, 7, 64, 65, 129])
def test_8_bits_on_the_gpu(count, names):
    operands = draw_8_bits(1000, 2048, 5632, count, names)
    assert_matches(run(HOPPER, *operands), *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("count", [2, 8, 63, 64, 65, 129])
def test_on_the_gpu_rows_keep_apart(count, dtype):
    assert_rows_keep_apart(HOPPER, (200, 2048, 5632, count), dtype)


@pytest.mark.gpu
@pytest.mark.parametrize("count", [1, 64, 65])
def test_on_the_gpu_results_repeat(count):
    """All bits of 50 calls: the parts of a sum are added in the same order, and when complete."""
    operands = jax.device_put(draw(200, 8192, 1408, count, True, jnp.bfloat16))
    call, listed = jitted(HOPPER), operands[0].rows[:count]
    expected = np.asarray(call(*operands)[0][listed])
    for _ in range(50):
        np.testing.assert_array_equal(np.asarray(call(*operands)[0][listed]), expected)

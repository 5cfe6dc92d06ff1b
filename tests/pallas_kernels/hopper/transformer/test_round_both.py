"""Arrays in 8 bits in both orders, to the bit, against NumPy."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.transformer.round_both import round_both
from tests import seeds
from tests.back_ends import BACK_ENDS

DTYPES = [jnp.bfloat16, jnp.float16]
E4M3, E5M2 = jnp.float8_e4m3fn, jnp.float8_e5m2
# Widths of the parts, M, T, n and how many parts were rotated.
CASES = {
    "one": ((64,), 64, None, 0, 0),
    "odd number of units": ((320,), 192, None, 0, 0),
    "grouped heads": ((256, 64, 64), 256, 128, 64, 2),
    "wide heads": ((512, 256, 128), 128, 64, 128, 1),
}
CASES_OF_MODELS = {
    "2b": ((2048, 2048, 2048), 4096, 2048, 64, 2),
    "Llama-3.1-8B": ((4096, 1024, 1024), 2048, 2048, 128, 2),
}
by_case = pytest.mark.parametrize(
    "case", [*CASES, *(pytest.param(c, marks=pytest.mark.gpu) for c in CASES_OF_MODELS)]
)


def jitted(kernels):
    return jax.jit(kernels.round_both, static_argnums=(2, 4))


def draw(case, dtype, rounded=E5M2):
    """The operands. Angles are multiples of a quarter turn, so that nothing is rounded but once."""
    widths, m, length, size, rotated = (CASES | CASES_OF_MODELS)[case]
    rng = seeds.rng()
    parts = [
        rng.standard_normal((m, width)) * 2.0 ** rng.integers(-9, 9, (m, width)) for width in widths
    ]
    parts = tuple(jnp.asarray(part, dtype) for part in parts)
    inverse = jnp.float32(2.0**-3)
    if length is None:
        return parts, inverse, rounded, None, rotated
    quarters = rng.integers(0, 4, (length, size // 2))
    tables = np.array([1, 0, -1, 0]), np.array([0, 1, 0, -1])
    angles = tuple(jnp.asarray(t[quarters], jnp.float32) for t in tables)
    return parts, inverse, rounded, angles, rotated


def by_numpy(parts, inverse, rounded, angles, rotated):
    """The bytes, by rows."""
    done = []
    for i, part in enumerate(parts):
        x = np.asarray(part, np.float32)
        if i < rotated:
            cos, sin = (np.tile(table, (len(x) // len(table), 1)) for table in angles)
            half = cos.shape[1]
            back = np.empty_like(x)
            for start in range(0, x.shape[1], 2 * half):
                a, b = x[:, start : start + half], x[:, start + half : start + 2 * half]
                back[:, start : start + half] = a * cos + b * sin
                back[:, start + half : start + 2 * half] = b * cos - a * sin
            x = back
        done.append(x)
    scaled = np.concatenate(done, axis=1) * np.float32(inverse)
    return scaled.astype(rounded)


def assert_matches(found, operands):
    values, transposed = (np.asarray(a).view(np.uint8) for a in found)
    np.testing.assert_array_equal(values & 0x7F, by_numpy(*operands).view(np.uint8) & 0x7F)
    signed = values & 0x7F != 0  # a zero has either sign
    expected = by_numpy(*operands).view(np.uint8)
    np.testing.assert_array_equal(values[signed], expected[signed])
    np.testing.assert_array_equal(transposed, values.T)


@pytest.mark.parametrize("kernels", BACK_ENDS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rounded", [E4M3, E5M2])
@by_case
def test_every_bit(case, rounded, dtype, kernels):
    operands = draw(case, dtype, rounded)
    assert_matches(jitted(kernels)(*operands), operands)


@pytest.mark.parametrize("kernels", BACK_ENDS)
def test_numbers_are_rotated_back(kernels):
    rng = seeds.rng()
    parts = tuple(jnp.asarray(a, jnp.bfloat16) for a in rng.standard_normal((2, 128, 128)))
    angle = rng.uniform(0, 7, (64, 32))
    angles = tuple(jnp.asarray(f(angle), jnp.float32) for f in (np.cos, np.sin))
    values, transposed = jitted(kernels)(parts, jnp.float32(1), E5M2, angles, 1)
    exact = by_numpy(parts, 1, E5M2, [np.asarray(a, np.float64) for a in angles], 1).astype(float)
    error = np.asarray(values, float) - exact
    assert np.linalg.norm(error) / np.linalg.norm(exact) < 1e-3  # few are rounded another way
    np.testing.assert_array_equal(np.asarray(transposed, float), np.asarray(values, float).T)


@pytest.mark.parametrize("kernels", BACK_ENDS)
@pytest.mark.parametrize("rounded", [E4M3, E5M2])
def test_what_is_not_finite_is_nan_and_nothing_else_is(rounded, kernels):
    part = np.array(draw("odd number of units", jnp.bfloat16)[0][0])
    part[3, 5], part[70, 319], part[191, 0] = np.inf, -np.inf, np.nan
    values, transposed = jitted(kernels)((jnp.asarray(part),), jnp.float32(0.125), rounded)
    bad = ~np.isfinite(part.astype(np.float32))
    np.testing.assert_array_equal(np.isnan(np.asarray(values, np.float32)), bad)
    np.testing.assert_array_equal(np.isnan(np.asarray(transposed, np.float32)), bad.T)


@pytest.mark.parametrize("case", CASES)
def test_in_the_interpreter(case, interpreted):
    operands = draw(case, jnp.bfloat16)
    with interpreted(sms=2):
        assert_matches(round_both(*operands), operands)


@pytest.mark.parametrize("case", CASES | CASES_OF_MODELS)
def test_lowers_without_a_gpu(lower, case):
    parts, inverse, _, angles, rotated = draw(case, jnp.bfloat16)
    for rounded, code in ((E4M3, "e4m3x2"), (E5M2, "e5m2x2")):
        text = lower(
            lambda parts, inverse, angles, to=rounded: round_both(
                parts, inverse, to, angles, rotated
            ),
            *(parts, inverse, angles),
        )
        assert "mosaic_gpu" in text and f"cvt.rn.satfinite.{code}.f32" in text


BF16 = jnp.bfloat16


@pytest.mark.parametrize(
    ("operands", "message"),
    [
        ([(jnp.zeros((60, 64), BF16),)], r"\[M, N\], M a multiple of 64, got bfloat16 \[60, 64\]"),
        ([(jnp.zeros((64, 64)),)], r"must be bfloat16 or float16 \[M, N\].*got float32"),
        ([(jnp.zeros((64, 96), BF16),)], r"parts\[0\] must have a multiple of 64 columns, got 96"),
        ([(jnp.zeros((64, 64), BF16), jnp.zeros((128, 64), BF16))], r"parts\[1\] must be .*\[64"),
        ([(jnp.zeros((64, 64), BF16),), None, 1], "rotated is 1, but there are no angles"),
        (
            [(jnp.zeros((64, 64), BF16),), 2 * [jnp.zeros((48, 32))], 1],
            r"angles must be.*M = 64",
        ),
        ([(jnp.zeros((64, 64), BF16),), 2 * [jnp.zeros((64, 64))], 1], "a multiple of 128 col"),
        (
            [(jnp.zeros((64, 64), BF16),), (jnp.zeros((64, 32)), jnp.zeros((64, 64))), 1],
            r"sines must be float32 \[64, 32\]",
        ),
    ],
)
def test_bad_operands_are_named(operands, message):
    parts, *angles = operands
    with pytest.raises(ValueError, match=message):
        round_both(parts, jnp.float32(1), E5M2, *angles)


def test_too_many_elements_are_refused():
    part = jax.ShapeDtypeStruct((2**16, 2**16), BF16)
    with pytest.raises(ValueError, match=r"less than 2\^32 elements, got 65536 x 65536"):
        jax.eval_shape(lambda part: round_both((part,), jnp.float32(1), E5M2), part)


def test_other_formats_are_refused():
    with pytest.raises(ValueError, match="float8_e4m3fn or float8_e5m2, got float8_e4m3b11fnuz"):
        round_both((jnp.zeros((64, 64), BF16),), jnp.float32(1), jnp.float8_e4m3b11fnuz)

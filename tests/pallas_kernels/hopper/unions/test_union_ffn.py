"""union_up and union_down, one after the other as they are used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.unions.union_down import union_down
from pallas_kernels.hopper.unions.union_up import union_up
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS
from pallas_kernels.quantised import Quantised, rounded
from pallas_kernels.rectifiers import RELU
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.eight_bits import in_float64, lost, shapes
from tests.pallas_kernels.planned import plan_shapes, planned, pre_activations
from tests.pallas_kernels.rectified import EVERYTHING, linear_of

DTYPES = [jnp.bfloat16, jnp.float16]
CASES = [  # M, D, H, density
    (1, 128, 128, 0.1),
    (300, 192, 256, 0.02),
    (300, 192, 256, 0),
    (300, 192, 256, 1),
]
# So many row tiles that a job has all tokens of one. In the other interpreted cases, and in
# those of 8 bits, it has half of them.
WHOLE_TILES = (1030, 192, 256, 0.02)
LARGE = [(1001, 2048, 5632, 0.003), (1300, 2048, 5632, 0.003), (300, 8192, 1408, 0.01)]
CASES_OF_8_BITS = [(1, 128, 128, 0.1), (257, 256, 128, 0.03)]


def draw(m, d, h, density, gated, dtype):
    """(x, gate, w_up, w_down, plan) and the dense gate. Three tokens have all active, and leave
    the unions; gates that nothing may read are NaN; the work list is as short as it can be."""
    rng = seeds.rng()
    z = pre_activations(m, h, density)
    dense = rng.permutation(m)[:3]
    z[dense] = np.abs(z[dense])
    arrays = [rng.standard_normal((m, d)), *(rng.standard_normal((2, h, d)) / d**0.5)]
    x, w_up, w_down = (a.astype(dtype) for a in arrays)
    gate, _, plan, heavy = planned(z, x)
    is_member = np.zeros(gate.shape[:2], bool)
    for r, size in enumerate(plan.sizes):
        is_member[r, plan.neurons[r, :size]] = True
    gate = np.where(is_member[:, :, None], gate, np.array(np.nan, dtype))
    g = np.maximum(z, 0).astype(dtype).astype(np.float64)
    g[heavy] = 0
    return (x, gate, w_up if gated else None, w_down, plan), g


def draw_8_bits(*case):
    """`draw` with x and w_up in 8 bits."""
    (x, gate, w_up, w_down, plan), g = draw(*case, True, jnp.bfloat16)
    x, w_up = jax.device_get(jax.tree.map(rounded, (x, w_up)))
    return (x, gate, w_up, w_down, plan), g


def program(up, down):
    """Blocks of h and l1, without gates and then with them if there are any; y from the last."""

    @jax.jit
    def program(x, gate, w_up, w_down, plan):
        with_gates = [True] if w_up is None else [False, True]
        hidden = [up(x, gate, w_up, plan, with_gate=with_gate) for with_gate in with_gates]
        return hidden, down(hidden[-1][0], (w_down,), plan, x.shape[0])

    return program


def run(up, down, *operands):
    return program(up, down)(*operands)


def assert_matches(out, g, x, gate, w_up, w_down, plan, act=RELU):
    ref = g
    if w_up is not None:
        ref = ref * linear_of(act, in_float64(x) @ in_float64(w_up).T)
    blocks, gates = (blocks_of(a, plan) for a in (ref, g))
    bound = lost(x.shape[1]) if isinstance(x, Quantised) else 0
    hidden, y = jax.device_get(out)
    assert len(hidden) == (1 if w_up is None else 2)
    for with_gate, (h, l1) in enumerate(hidden):
        np.testing.assert_allclose(l1, np.abs(ref).sum(), rtol=1e-4 + bound)
        *above, h = np.split(h[: len(blocks)], h.shape[1] // CHUNK_NEURONS, axis=1)
        np.testing.assert_allclose(h, blocks, rtol=1e-2, atol=1e-2 + bound * np.max(g))
        assert len(above) == with_gate
        for array in above:
            np.testing.assert_array_equal(array, gates)
    assert y.dtype == gate.dtype and y.shape == (-(-len(x) // 8) * 8, x.shape[1])
    ref_y = ref @ np.asarray(w_down, np.float64)
    assert relative_error(y[: len(x)], ref_y) <= 2 * ROUNDING + bound  # of h and of y


def draw_added(*case):
    """Operands of `union_down` without and with a residual."""
    (x, gate, w_up, w_down, plan), _ = draw(*case)
    h, _ = jax.jit(REFERENCE.union_up)(x, gate, w_up, plan)
    residual = seeds.rng().standard_normal(x.shape).astype(x.dtype)
    return (h, (w_down,), plan), residual


def added_to(residual, down, operands):
    """What `down` returns with the residual, and without."""
    m = len(residual)
    call = jax.jit(lambda *operands: down(*operands[:3], m, *operands[3:]))
    return call(*operands, residual)[:m], call(*operands)[:m]


def assert_adds_rounded_sums(down, operands, residual):
    """Bits: the kernel rounds as XLA does where it adds a result of the kernel."""
    y, alone = (np.asarray(a, np.float32) for a in added_to(residual, down, operands))
    expected = (residual.astype(np.float32) + alone).astype(residual.dtype)
    np.testing.assert_array_equal(y, expected.astype(np.float32))


def blocks_of(dense, plan):
    """The matrix `dense: [M, H]` in the blocks of the plan, with zeros to the end of each chunk."""
    blocks = np.zeros((plan.item_count[0], CHUNK_NEURONS, TILE_TOKENS))
    for r, size in enumerate(plan.sizes):
        tile = dense[TILE_TOKENS * r : TILE_TOKENS * (r + 1), plan.neurons[r, :size]].T
        first, count = plan.firsts[r], -(-size // CHUNK_NEURONS)
        rows = blocks[first : first + count].reshape(-1, TILE_TOKENS)  # a view
        rows[:size, : tile.shape[1]] = tile
    return blocks


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("case", "gated"), [*((case, True) for case in CASES), (CASES[1], False)])
def test_reference(case, gated):
    operands, g = draw(*case, gated, jnp.bfloat16)
    assert_matches(run(REFERENCE.union_up, REFERENCE.union_down, *operands), g, *operands)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", CASES)
def test_reference_adds_to_a_residual(case):
    operands, residual = draw_added(*case, True, jnp.bfloat16)
    y, alone = added_to(residual, REFERENCE.union_down, operands)
    expected = np.asarray(alone, np.float64) + np.asarray(residual, np.float64)
    assert relative_error(y, expected) <= 2 * ROUNDING  # XLA may leave out the one of `alone`


@pytest.mark.slow
@pytest.mark.parametrize("case", [CASES[0], pytest.param(WHOLE_TILES, marks=pytest.mark.slow)])
def test_interpreted_adds_to_a_residual(case, interpreted):
    operands, residual = draw_added(*case, True, jnp.bfloat16)
    with interpreted():
        assert_adds_rounded_sums(union_down, operands, residual)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("case", [*CASES, *LARGE, (1300, 192, 256, 0.5)])
def test_adds_to_a_residual_on_the_gpu(case, dtype):
    operands, residual = draw_added(*case, True, dtype)
    for _ in range(3):
        assert_adds_rounded_sums(union_down, operands, residual)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("case", CASES_OF_8_BITS)
def test_reference_with_8_bits(case):
    operands, g = draw_8_bits(*case)
    assert_matches(run(REFERENCE.union_up, REFERENCE.union_down, *operands), g, *operands)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [CASES_OF_8_BITS[0], pytest.param(CASES_OF_8_BITS[1], marks=pytest.mark.slow)]
)
def test_8_bits_interpreted(case, interpreted):
    operands, g = draw_8_bits(*case)
    # Two stages that hold different views count as one piece of memory to the race detector.
    with interpreted(detect_races=False):
        assert_matches(run(union_up, union_down, *operands), g, *operands)


@pytest.mark.parametrize(
    ("case", "gated", "act"),
    [
        pytest.param(WHOLE_TILES, True, EVERYTHING, marks=pytest.mark.slow),
        (CASES[3], False, RELU),
    ],
)
def test_interpreted(case, gated, act, interpreted):
    operands, g = draw(*case, gated, jnp.bfloat16)
    with interpreted():
        out = run(functools.partial(union_up, rectifier=act), union_down, *operands)
        assert_matches(out, g, *operands, act)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("shape", "gated", "dtype", "act"),
    [
        ((1, 128, 128), False, jnp.bfloat16, RELU),
        ((1, 128, 128), True, jnp.bfloat16, EVERYTHING),
        ((65, 8192, 65536), True, jnp.float16, RELU),
    ],
)
def test_lowers_without_a_gpu(lower, shape, gated, dtype, act):
    m, d, h = shape
    tiles, w, plan = -(-m // TILE_TOKENS), jax.ShapeDtypeStruct((h, d), dtype), plan_shapes(m, h)
    x = jax.ShapeDtypeStruct((m, d), dtype)
    gate = jax.ShapeDtypeStruct((tiles, h, TILE_TOKENS), dtype)
    call = functools.partial(run, functools.partial(union_up, rectifier=act), union_down)
    text = lower(call, x, gate, w if gated else None, w, plan)
    assert text.count("@mosaic_gpu") == (3 if gated else 2)
    h = jax.ShapeDtypeStruct((tiles * h // 128, 128, TILE_TOKENS), dtype)
    assert "@mosaic_gpu" in lower(lambda *a: union_down(*a[:3], m, a[3]), h, (w,), plan, x)


def test_8_bits_lower_without_a_gpu(lower):
    m, d, h = 2000, 8192, 65536
    x, w = (shapes(rows, d) for rows in (m, h))
    gate = jax.ShapeDtypeStruct((8, h, TILE_TOKENS), jnp.float16)
    assert "m64n256k32.f32.e4m3.e4m3" in lower(union_up, x, gate, w, plan_shapes(m, h))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [*CASES_OF_8_BITS, (300, 256, 256, 0), (300, 256, 256, 1), *LARGE])
def test_8_bits_on_the_gpu(case):
    operands, g = draw_8_bits(*case)
    assert_matches(run(union_up, union_down, *operands), g, *operands)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*CASES, *LARGE, (1300, 192, 256, 0.5)])
def test_on_the_gpu(case, gated, dtype):
    operands, g = draw(*case, gated, dtype)
    assert_matches(run(union_up, union_down, *operands), g, *operands)


@pytest.mark.gpu
def test_many_jobs_for_each_sm_some_of_them_empty():
    in_sequence = np.arange(5000) // TILE_TOKENS % 3 == 0
    operands, g = draw(5000, 2048, 3840, 0.01 * in_sequence[:, None], True, jnp.bfloat16)
    assert operands[-1].item_count[0] > 132  # jobs of union_up; union_down has 320
    call = program(union_up, union_down)
    for _ in range(3):  # each kernel left the job counter at 0
        assert_matches(call(*operands), g, *operands)


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_token():
    (x, gate, w_up, w_down, plan), _ = draw(300, 192, 384, 0.05, True, jnp.bfloat16)
    x[7], x[290, 3] = np.nan, np.inf
    _, y = run(union_up, union_down, x, gate, w_up, w_down, plan)
    is_finite = np.isfinite(np.asarray(y[:300], np.float32)).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~is_finite), [7, 290])


def test_bad_shapes_are_named():
    x, gate, w_up, w_down, plan = draw(*CASES[0], True, jnp.bfloat16)[0]
    with pytest.raises(ValueError, match=r"gate must be .*\[1, 128, 256\].*\[2, 128, 256\]"):
        union_up(x, np.concatenate([gate, gate]), w_up, plan)
    with pytest.raises(ValueError, match=r"w_up must be .*\[128, 128\].*\[128, 64\]"):
        union_up(x, gate, w_up[:, :64], plan)
    h = np.zeros((2, 192, 256), w_down.dtype)
    with pytest.raises(ValueError, match=r"h must be .*\[2, 128, 256\].*\[2, 128, 128\]"):
        union_down(h[:, :128, :128], (w_down,), plan, 9)
    with pytest.raises(ValueError, match=r"h must be .*\[2, 128, 256\].*\[2, 192, 256\]"):
        union_down(h, (w_down,), plan, 9)
    with pytest.raises(ValueError, match=r"plan.neurons must be .*\[2, 128\].*\[1, 128\]"):
        union_down(h[:, :128], (w_down,), plan, 300)
    with pytest.raises(ValueError, match=r"residual must be .*\[9, 128\].*\[8, 128\]"):
        union_down(h[:, :128], (w_down,), plan, 9, np.zeros((8, 128), w_down.dtype))

"""gates_down on gates as gate_union and union_plan leave them."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.frames import gathered_matmul
from pallas_kernels.hopper.gates_down import gates_down
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts.tile_union import TILE_TOKENS, Plan
from tests import seeds
from tests.errors import ROUNDING, relative_error
from tests.pallas_kernels.planned import for_unions, pre_activations, with_dense_tokens

CASES = [  # M, D, H, density
    (1, 128, 128, 0.1),
    (300, 192, 256, 0.02),
    (300, 192, 256, 0),
    (300, 192, 256, 1),
]
LARGE = [(1001, 2048, 5632, 0.003), (1300, 2048, 5632, 0.003), (300, 8192, 1408, 0.01)]


def draw(m, d, h, density, dtype=jnp.bfloat16):
    """(gate, w_down, plan, m) and the dense gate. Three tokens fire everywhere, to leave the
    unions; gates that nothing may read are NaN."""
    rng = seeds.rng()
    z = with_dense_tokens(pre_activations(m, h, density))
    w_down = (rng.standard_normal((h, d)) / d**0.5).astype(dtype)
    gate, plan, g = for_unions(z, np.zeros((m, d), dtype))
    return (gate, w_down, plan, m), g


def run(down, gate, w_down, plan, m):
    return jax.jit(down, static_argnums=3)(gate, w_down, plan, m)


def assert_matches(out, g, gate, w_down, plan, m):
    y, l1 = jax.device_get(out)
    assert y.dtype == gate.dtype and y.shape == (-(-m // 8) * 8, w_down.shape[1])
    assert relative_error(y[:m], g @ w_down.astype(np.float64)) <= ROUNDING
    assert l1.dtype == np.float32
    np.testing.assert_allclose(l1.sum(), np.abs(g).sum(), rtol=1e-5)


@pytest.mark.parametrize("case", CASES)
def test_reference(case):
    operands, g = draw(*case)
    assert_matches(run(REFERENCE.gates_down, *operands), g, *operands)


# Jobs of whole tiles, or of half of them; more jobs share the sum of |h| than a union has steps.
@pytest.mark.parametrize(
    ("case", "few_tiles"),
    [(CASES[1], 0), (CASES[2], 0), (CASES[3], 2), ((300, 384, 128, 0.3), 0)],
)
def test_interpreted(case, few_tiles, interpreted, monkeypatch):
    monkeypatch.setattr(gathered_matmul, "_FEW_TILES", few_tiles)
    operands, g = draw(*case)
    with interpreted():
        assert_matches(run(gates_down, *operands), g, *operands)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [((1, 128, 128), jnp.bfloat16), ((65, 8192, 65536), jnp.float16)],
)
def test_lowers_without_a_gpu(lower, shape, dtype):
    m, d, h = shape
    tiles = -(-m // TILE_TOKENS)
    shapes = [(tiles, h), (tiles,), (tiles * h // 128,), (1,), (tiles,)]
    plan = Plan(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))
    gate = jax.ShapeDtypeStruct((tiles, h, TILE_TOKENS), dtype)
    w_down = jax.ShapeDtypeStruct((h, d), dtype)
    text = lower(lambda *operands: gates_down(*operands, m), gate, w_down, plan)
    assert text.count("@mosaic_gpu") == 1


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("case", [*CASES, *LARGE, (1300, 192, 256, 0.5), (1300, 2048, 5632, 0)])
def test_on_the_gpu(case, dtype):
    operands, g = draw(*case, dtype)
    assert_matches(run(gates_down, *operands), g, *operands)


@pytest.mark.gpu
def test_many_jobs_for_each_sm_some_of_them_empty():
    in_sequence = np.arange(5000) // TILE_TOKENS % 3 == 0
    operands, g = draw(5000, 2048, 3840, 0.01 * in_sequence[:, None])
    call = jax.jit(gates_down, static_argnums=3)
    for _ in range(3):  # the kernel left the job counter at 0
        assert_matches(call(*operands), g, *operands)


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_token():
    (gate, w_down, plan, m), _ = draw(300, 192, 384, 0.05)
    gate = np.array(gate)
    for tile, token, value in ((0, 7, np.nan), (1, 290 - TILE_TOKENS, np.inf)):
        gate[tile, plan.neurons[tile, 0], token] = value
    y, l1 = jax.device_get(run(gates_down, gate, w_down, plan, m))
    is_finite = np.isfinite(y[:m].astype(np.float32)).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~is_finite), [7, 290])
    assert np.isnan(l1.sum())


def test_bad_shapes_are_named():
    (gate, w_down, plan, m), _ = draw(*CASES[0])
    with pytest.raises(ValueError, match=r"gate must be .*\[1, 128, 256\].*\[2, 128, 256\]"):
        gates_down(np.concatenate([gate, gate]), w_down, plan, m)
    with pytest.raises(ValueError, match=r"gate must be float16 .*bfloat16"):
        gates_down(gate, w_down.astype(np.float16), plan, m)
    with pytest.raises(ValueError, match=r"w_down must be \[H, D\].*\[128, 100\]"):
        gates_down(gate, w_down[:, :100], plan, m)
    with pytest.raises(ValueError, match=r"plan.neurons must be .*\[2, 128\].*\[1, 128\]"):
        gates_down(np.concatenate([gate, gate]), w_down, plan, 300)

"""union_up and union_down, one after the other as they are used."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import tile_union, union_plan
from pallas_kernels.tile_union import TOKENS
from pallas_kernels.union_down import union_down, union_down_reference
from pallas_kernels.union_up import union_up, union_up_reference

DTYPES = [jnp.bfloat16, jnp.float16]
CASES = [  # M, D, H, density
    (1, 128, 128, 0.1),
    (300, 192, 384, 0.002),
    (700, 320, 256, 0),
    (520, 128, 256, 1),
]


def draw(m, d, h, density, gated, dtype):
    """(x, gate, w_up, w_down, plan) and the dense gate; three tokens fire everywhere and leave the
    unions, and what nobody should read is NaN."""
    rng = np.random.default_rng()
    z = rng.uniform(0.1, 9, (m, h)).astype(np.float32)
    z = np.where(rng.random((m, h)) < density, z, -z)
    dense = rng.permutation(m)[:3]
    z[dense] = np.abs(z[dense])
    arrays = [rng.standard_normal((m, d)), *(rng.standard_normal((2, h, d)) / d**0.5)]
    x, w_up, w_down = (jnp.asarray(a, dtype) for a in arrays)
    gate, masks, counts = tile_union.pack_reference(jnp.asarray(z), dtype)
    gate_ref = jax.new_ref(gate)
    plan, _, (count, rows, _) = union_plan.union_plan_reference(x, gate_ref, masks, counts)
    is_member = np.zeros(gate.shape[:2], bool)
    for r, size in enumerate(plan.sizes):
        is_member[r, plan.neurons[r, :size]] = True
    gate = jnp.where(is_member[:, :, None], gate_ref[...], jnp.nan)
    g = np.asarray(jnp.asarray(np.maximum(z, 0), dtype), np.float64)
    g[np.asarray(rows)[: count[0]]] = 0
    return (x, gate, w_up if gated else None, w_down, plan), g


def run(up, down, x, gate, w_up, w_down, plan, keep=0.5):
    @jax.jit
    def run(x, gate, w_up, w_down, plan):
        h, l1, factors = up(x, gate, w_up, plan, keep=max(1, int(keep * plan.items.size)))
        same_h, same_l1 = up(x, gate, w_up, plan)
        return h, l1, down(same_h, (w_down,), plan, x.shape[0]), factors, same_l1

    return run(x, gate, w_up, w_down, plan)


def assert_matches(out, g, x, gate, w_up, w_down, plan):
    h, l1, y, factors, same_l1 = out
    ref = g
    if w_up is not None:
        ref = ref * (np.asarray(x, np.float64) @ np.asarray(w_up, np.float64).T)
    for sum_of_h in (l1, same_l1):
        np.testing.assert_allclose(sum_of_h, np.abs(ref).sum(), rtol=1e-4)
    for r, size in enumerate(plan.sizes):  # and zeros to the end of the chunk
        tile = np.asarray(ref[TOKENS * r : TOKENS * (r + 1), plan.neurons[r, :size]]).T
        expected = np.zeros((-(-size // 128), 128, TOKENS))
        expected.reshape(-1, TOKENS)[:size, : tile.shape[1]] = tile
        blocks = h[plan.firsts[r] : plan.firsts[r] + len(expected)]
        np.testing.assert_allclose(blocks, expected, rtol=1e-2, atol=1e-2)
    items = int(plan.item_count[0])  # if they are more than there is room for, the last is spoilt
    kept = items if items <= len(factors) else len(factors) - 1
    parts = np.split(np.asarray(factors[:kept], np.float64), factors.shape[1] // 128, axis=1)
    np.testing.assert_allclose(np.prod(parts, axis=0), h[:kept], rtol=1e-2, atol=1e-2)
    for item, block in zip(np.asarray(plan.items[:kept]), parts[0], strict=True):
        tile, chunk = divmod(item, gate.shape[1] // 128)
        column = 128 * chunk + np.arange(128)
        columns = column[column < plan.sizes[tile]]
        gates = np.asarray(gate[tile, plan.neurons[tile, columns]], np.float64)
        np.testing.assert_array_equal(block[: len(columns)], gates)
    ref = ref @ np.asarray(w_down, np.float64)
    assert y.dtype == x.dtype and y.shape == (-(-len(x) // 8) * 8, x.shape[1])
    y = y[: len(x)]
    error = np.linalg.norm(np.asarray(y, np.float64) - ref)
    assert error <= 5e-3 * np.linalg.norm(ref)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", CASES)
def test_reference(case, gated):
    operands, g = draw(*case, gated, jnp.bfloat16)
    assert_matches(run(union_up_reference, union_down_reference, *operands), g, *operands)


@pytest.mark.parametrize(("case", "gated"), [(CASES[1], True), (CASES[2], True), (CASES[3], False)])
def test_interpreted(case, gated, interpreted):
    operands, g = draw(*case, gated, jnp.bfloat16)
    with interpreted():  # what is not kept would be a race
        assert_matches(run(union_up, union_down, *operands, keep=1), g, *operands)


@pytest.mark.parametrize(
    ("shape", "gated", "dtype"),
    [
        ((1, 128, 128), True, jnp.bfloat16),
        ((1, 128, 128), False, jnp.float16),
        ((1001, 2048, 5632), True, jnp.float16),
        ((65, 8192, 65536), True, jnp.bfloat16),
        ((65, 8192, 65536), False, jnp.bfloat16),
    ],
)
def test_lowers_without_a_gpu(lower, shape, gated, dtype):
    m, d, h = shape
    tiles, i32 = -(-m // TOKENS), jnp.int32
    w = jax.ShapeDtypeStruct((h, d), dtype)
    shapes = [(tiles, h), (tiles,), (tiles * h // 128,), (1,), (tiles,)]
    plan = tile_union.Plan(*(jax.ShapeDtypeStruct(shape, i32) for shape in shapes))
    x = jax.ShapeDtypeStruct((m, d), dtype)
    gate = jax.ShapeDtypeStruct((tiles, h, TOKENS), dtype)
    call = functools.partial(run, union_up, union_down)
    text = lower(call, x, gate, w if gated else None, w, plan)
    assert text.count("@mosaic_gpu") == 3


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("case", [*CASES, (1001, 2048, 5632, 0.003), (300, 8192, 1408, 0.01)])
def test_on_the_gpu(case, gated, dtype):
    operands, g = draw(*case, gated, dtype)
    assert_matches(run(union_up, union_down, *operands), g, *operands)


@pytest.mark.gpu
def test_what_is_not_finite_stays_in_its_token():
    (x, gate, w_up, w_down, plan), _ = draw(300, 192, 384, 0.05, True, jnp.bfloat16)
    x = x.at[7].set(jnp.nan).at[290, 3].set(jnp.inf)
    y = run(union_up, union_down, x, gate, w_up, w_down, plan)[2]
    is_finite = np.isfinite(np.asarray(y[:300], np.float32)).all(axis=1)
    np.testing.assert_array_equal(np.flatnonzero(~is_finite), [7, 290])


def test_bad_shapes_are_named():
    x, gate, w_up, w_down, plan = draw(9, 128, 256, 0.1, True, jnp.bfloat16)[0]
    with pytest.raises(ValueError, match=r"gate must be .*\[1, 256, 256\].*\[2, 256, 256\]"):
        union_up(x, jnp.concatenate([gate, gate]), w_up, plan)
    with pytest.raises(ValueError, match=r"w_up must be .*\[256, 128\].*\[256, 64\]"):
        union_up(x, gate, w_up[:, :64], plan)
    h = jnp.zeros((2, 128, 256), jnp.bfloat16)
    with pytest.raises(ValueError, match=r"h must be .*\[2, 128, 256\].*\[2, 128, 128\]"):
        union_down(h[:, :, :128], (w_down,), plan, 9)
    with pytest.raises(ValueError, match=r"plan.neurons must be .*\[2, 256\].*\[1, 256\]"):
        union_down(h, (w_down,), plan, 300)
    with pytest.raises(ValueError, match=r"keep must be from 0 to 2, .* got 3"):
        union_up(x, gate, w_up, plan, keep=3)

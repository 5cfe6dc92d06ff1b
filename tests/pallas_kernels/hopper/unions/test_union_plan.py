import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper.unions.union_plan import union_plan
from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import CHUNK_NEURONS, TILE_TOKENS
from pallas_kernels.quantised import Tokens, rounded
from tests import seeds
from tests.pallas_kernels.eight_bits import shapes
from tests.pallas_kernels.planned import pre_activations
from tests.pattern_shares import shares

pack = jax.jit(tile_union.pack, static_argnums=1)
SHAPE = 970, 1280  # of most cases, so that they share a compiled program
PLANNERS = [
    pytest.param(REFERENCE.union_plan, id="reference"),
    pytest.param(union_plan, marks=pytest.mark.gpu, id="union_plan"),
]


def run(planner, x, gate, masks, counts, **options):
    @jax.jit
    def run(x, gate, masks, counts):
        gate_ref = jax.new_ref(gate)
        out = planner(x, gate_ref, masks, counts, **options)
        return gate_ref[...], out

    return run(x, gate, masks, counts)


def make(planner, z, **options):
    """(plan, heavy) for pre-activations z, after checking them.

    The unions hold all that tokens that are not heavy need; the work list holds each of their items
    once and nothing else; the list of heavy rows holds the other tokens.
    """
    (m, h), active = z.shape, z > 0
    x = seeds.rng().standard_normal((m, 128)).astype(jnp.bfloat16)
    before, masks, counts = jax.device_get(pack(z, x.dtype))
    x = jax.device_get(Tokens(x, rounded(x)))
    out = run(planner, x, before, masks, counts, **options)
    gate, (plan, nnz, listed_rows, needs) = jax.device_get(out)
    np.testing.assert_array_equal(nnz, active.sum(axis=1))
    of_unions, _ = shares(active)
    all_chunks = -(-m // TILE_TOKENS) * h // tile_union.CHUNK_NEURONS
    np.testing.assert_array_equal(needs, [round(of_unions * all_chunks), 0])

    (count,) = listed_rows.count
    rows = listed_rows.rows[:count]
    for listed, all_rows in zip(jax.tree.leaves(listed_rows.x), jax.tree.leaves(x), strict=True):
        np.testing.assert_array_equal(listed[:count], all_rows[rows])
    heavy = np.zeros(m, bool)
    heavy[rows] = True
    assert heavy.sum() == count
    items = []
    firsts, listed = plan.firsts, plan.items
    for r, size in enumerate(plan.sizes):
        neurons = plan.neurons[r, :size]
        tile = slice(TILE_TOKENS * r, TILE_TOKENS * (r + 1))
        stays = np.pad(~heavy[tile], (0, max(0, TILE_TOKENS * (r + 1) - m)))
        np.testing.assert_array_equal(gate[r, neurons], before[r, neurons] * stays)
        used = np.flatnonzero((active[tile] & ~heavy[tile, None]).any(axis=0))
        assert set(used) <= set(neurons) and (np.diff(neurons) > 0).all()
        if not heavy[tile].any():
            assert size == active[tile].any(axis=0).sum()
        mine = [r * (h // CHUNK_NEURONS) + chunk for chunk in range(-(-size // CHUNK_NEURONS))]
        np.testing.assert_array_equal(listed[firsts[r] : firsts[r] + len(mine)], mine)
        items += mine
    np.testing.assert_array_equal(np.sort(listed[: plan.item_count[0]]), items)
    return plan, np.flatnonzero(heavy)


@pytest.mark.sampled(2)
@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize(
    ("m", "h", "density"),
    [
        (1, 128, 0),
        (1, 128, 1),
        (*SHAPE, 0.002),
        (*SHAPE, 0.1),
        pytest.param(257, 384, 0.01, marks=pytest.mark.gpu),
        pytest.param(300, 5632, 0.1, marks=pytest.mark.gpu),
    ],
)
def test_without_outlying_tokens_or_with_only_such(m, h, density, planner):
    make(planner, pre_activations(m, h, density))


@pytest.mark.parametrize("planner", PLANNERS)
def test_a_few_dense_tokens_leave_and_many_stay(planner):
    z = pre_activations(*SHAPE, 0.001)
    few = [3, 200]
    z[few] = np.abs(z[few])
    z[TILE_TOKENS : 2 * TILE_TOKENS] = np.abs(z[TILE_TOKENS : 2 * TILE_TOKENS])
    plan, heavy = make(planner, z)
    np.testing.assert_array_equal(heavy, few)
    assert plan.sizes[1] == 1280 and max(plan.sizes[0], plan.sizes[2]) < 600


@pytest.mark.parametrize("planner", PLANNERS)
def test_tiles_without_room_leave(planner):
    z = pre_activations(*SHAPE, 0.002)
    z[3] = np.abs(z[3])  # leaves its tile
    plan, _ = make(planner, z)
    (items,) = plan.item_count
    for room, stay in ((items, 4), (items - 1, 3), (1, 0)):
        plan, heavy = make(planner, z, max_items=int(room))
        assert plan.items.shape == (room,)
        np.testing.assert_array_equal(plan.sizes > 0, np.arange(4) < stay)
        expected = {3, *range(stay * TILE_TOKENS, len(z))}
        np.testing.assert_array_equal(heavy, sorted(expected))


@pytest.mark.parametrize("planner", PLANNERS)
@pytest.mark.parametrize("value", [np.inf, -np.inf, np.nan])
def test_tokens_that_are_not_finite_always_leave(value, planner):
    z = np.abs(pre_activations(*SHAPE, 1))
    z[[7, 299]] = value
    x = np.ones((len(z), 128), jnp.bfloat16)
    gate, (plan, _, heavy, needs) = jax.device_get(run(planner, x, *pack(z, x.dtype)))
    assert needs[1] == 2
    assert not np.concatenate(gate, axis=1)[:, [7, 299]].any()
    np.testing.assert_array_equal(np.sort(heavy.rows[: heavy.count[0]]), [7, 299])
    assert (plan.sizes == z.shape[1]).all()


@pytest.mark.parametrize("planner", PLANNERS)
def test_only_so_many_tokens_may_leave_and_later_ones_stay(planner):
    z = pre_activations(*SHAPE, 0.001)
    few = [3, 200, 300, 800]
    z[few] = np.abs(z[few])
    for most, leave in ((4, 4), (3, 3), (2, 2), (1, 0), (0, 0)):
        _, heavy = make(planner, z, max_heavy=most)
        np.testing.assert_array_equal(heavy, few[:leave])


@pytest.mark.slow
@pytest.mark.parametrize("planner", PLANNERS)
def test_many_tiles(planner):
    m, h = 70 * TILE_TOKENS + 9, 256
    z = pre_activations(m, h, 0.001)
    leaving = np.arange(5, m, 3 * TILE_TOKENS)
    z[leaving] = np.abs(z[leaving])
    plan, heavy = make(planner, z)
    np.testing.assert_array_equal(heavy, leaving)
    _, heavy = make(planner, z, max_heavy=len(leaving) - 5)
    np.testing.assert_array_equal(heavy, leaving[:-5])
    items = int(plan.item_count[0])
    z[40 * TILE_TOKENS : 41 * TILE_TOKENS, :200] = 1  # one item more than before
    plan, heavy = make(planner, z, max_items=items)
    np.testing.assert_array_equal(heavy, [*leaving, *range(70 * TILE_TOKENS, m)])


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("m", "h", "density", "options", "expected"),
    [
        (257, 384, 0.01, {}, [3, 256]),
        (300, 1280, 0.001, {}, [3, 256]),
        (300, 1280, 0.001, {"max_heavy": 1}, [3]),
        (300, 1280, 0.001, {"max_items": 3}, [3, *range(256, 300)]),
    ],
)
def test_interpreted(m, h, density, options, expected, interpreted):
    z = pre_activations(m, h, density)
    z[[3, 256]] = np.abs(z[[3, 256]])
    with interpreted():
        _, heavy = make(union_plan, z, **options)
    np.testing.assert_array_equal(heavy, expected)


@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize(
    ("m", "d", "h", "in_8_bits"), [(1, 128, 128, False), (1000, 8192, 65536, True)]
)
def test_lowers_without_a_gpu(lower, m, d, h, in_8_bits, dtype):
    tiles = -(-m // TILE_TOKENS)
    x = jax.ShapeDtypeStruct((m, d), dtype)
    operands = (
        Tokens(None, shapes(m, d)) if in_8_bits else x,
        jax.ShapeDtypeStruct((tiles, h, TILE_TOKENS), dtype),
        jax.ShapeDtypeStruct((2, tiles, h // 32), jnp.uint32),
        jax.ShapeDtypeStruct((h // 64, tiles * TILE_TOKENS), jnp.uint8),
    )
    assert "mosaic_gpu" in lower(functools.partial(run, union_plan), *operands)


def test_bad_operands_are_named():
    x, counts = jnp.zeros((9, 128), jnp.bfloat16), jnp.zeros((2, 256), jnp.uint8)
    gate_ref = jax.new_ref(jnp.zeros((1, 128, 256), jnp.bfloat16))
    with pytest.raises(ValueError, match=r"masks must be uint32 \[2, 1, 4\].*\[2, 3, 4\]"):
        union_plan(x, gate_ref, jnp.zeros((2, 3, 4), jnp.uint32), counts)
    for number in (0, 2):
        with pytest.raises(ValueError, match=f"max_items must be from 1 to 1, got {number}"):
            union_plan(x, gate_ref, jnp.zeros((2, 1, 4), jnp.uint32), counts, max_items=number)

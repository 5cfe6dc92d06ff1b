"""The block by every back end and algorithm, against float64 and against dense XLA."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding

from tests.conformance.cases import (
    ALGORITHMS,
    COLUMNS,
    PACKED,
    TOKENS,
    assert_same_stats,
    by,
    draw,
    draw_exact,
    either_form,
    every_algorithm,
    every_packing,
    in_float32,
    run,
    xla,
)
from tests.devices import make_mesh, place
from tests.errors import relative_error
from tests.pattern_shares import fired_tiles, shares
from twell_jax import explain, sparse_ffn
from twell_jax.ffn.stats import NOT_MEASURED
from twell_jax.models import PREFILL_OPTIONS


def draw_for(algorithm, **options):
    """Operands of one shape for each algorithm, so that most cases share a compiled program."""
    return draw(ALGORITHMS[algorithm][1], 192, 640, **options)


def reference(x, w_gate, w_up, w_down):
    """y, nnz [M] and sum |h| [M] in float64 behind the gate as rounded to the dtype."""
    dtype = x.dtype
    x, w_gate, w_up, w_down = (
        None if a is None else a.astype(np.float64) for a in (x, w_gate, w_up, w_down)
    )
    g = np.maximum(x @ (w_up if w_gate is None else w_gate).T, 0)
    g = g.astype(dtype).astype(np.float64)
    h = g if w_gate is None else g * (x @ w_up.T)
    return h @ w_down, np.sum(g != 0, axis=1), np.sum(np.abs(h), axis=1)


def assert_exact(operands, algorithm):
    (y, stats), (again, stats_again) = run(algorithm, *operands), run(algorithm, *operands)
    np.testing.assert_array_equal(again, y)
    assert_same_stats(algorithm, operands, stats_again, stats)
    y_ref, nnz, l1 = reference(*operands)
    assert y.dtype == operands[0].dtype
    assert relative_error(y, y_ref) < 5e-3
    # A gate within rounding of zero may fall on either side of it.
    np.testing.assert_allclose(stats.nnz, nnz.mean(), rtol=1e-3)
    np.testing.assert_allclose(stats.l1, l1.mean(), rtol=5e-3)
    assert abs(int(stats.max_nnz) - nnz.max()) <= 2
    return y, stats


@pytest.mark.sampled(8)
@every_algorithm
@either_form
@pytest.mark.parametrize(("last_feature", "heavy"), [(1, 0), (1, 7), (0, 0), (-1, 0)])
def test_sparse_heavy_half_and_dense_rows(back_end, algorithm, last_feature, heavy, gated):
    operands = draw_for(algorithm, gated=gated)
    operands[0][:, -1] = last_feature
    operands[0][:heavy, -1] = -1
    _, stats = assert_exact(operands, algorithm)
    if last_feature:  # else a neuron may be active for some tokens by rounding alone
        np.testing.assert_array_equal(stats.fired, xla(*operands)[1].fired)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("algorithm", "m"),
    [
        *(("few_tokens", m) for m in (1, 33)),
        *((a, m) for a in ("dense_block", *PACKED) for m in (65, 1000)),
    ],
)
@either_form
@pytest.mark.parametrize("dtype", [jnp.bfloat16, jnp.float16])
@pytest.mark.parametrize("last_feature", [1, 0, -1])
def test_rows_of_any_number_and_dtype(algorithm, m, last_feature, gated, dtype):
    operands = draw(m, 512, 1408, gated=gated, dtype=dtype)
    operands[0][:, -1] = last_feature
    assert_exact(operands, algorithm)


@pytest.mark.sampled(4)
@every_algorithm
@pytest.mark.parametrize("shape", [(192, 640), (128, 128)])
def test_shapes(back_end, algorithm, shape):
    operands = draw(ALGORITHMS[algorithm][1], *shape)
    operands[0][0, -1] = -1
    assert_exact(operands, algorithm)


@pytest.mark.gpu
@every_algorithm
@pytest.mark.parametrize(
    ("d", "h"),
    [(128, 65536), (512, 5632), (768, 128), (1024, 1408), (2048, 5632), (4096, 384), (8192, 640)],
)
def test_large_shapes(algorithm, d, h):
    tokens = {"few_tokens": 3, "dense_block": 200, "twell": 130, "unions": 600}
    operands = draw(tokens[algorithm], d, h)
    operands[0][0, -1] = -1
    assert_exact(operands, algorithm)


@pytest.mark.gpu
@every_packing
@pytest.mark.parametrize("every", [16384, 1024, 100])
def test_heavy_rows_at_full_size(algorithm, every):
    operands = draw(16384, 2048, 5632, threshold=2.57)
    operands[0][7::every, -1] = -1
    assert_exact(operands, algorithm)


@pytest.mark.gpu
@every_packing
@pytest.mark.parametrize("m", [256, 512, 1000, 4096])
@pytest.mark.parametrize(
    "options",
    [{}, {"xla_gpu_enable_command_buffer": ""}, PREFILL_OPTIONS],
    ids=["graphs", "no graphs", "prompts"],
)
def test_overlapping_kernels(algorithm, m, options):
    """Layers in a loop: one kernel after the other, the next one early, or several at once."""
    layers = [draw(m, 2048, 5632, threshold=2.57) for _ in range(3)]
    for i, (x, *_) in enumerate(layers):
        x[7 :: (m, 100, 5)[i], -1] = -1  # short and long lists of heavy rows
    operands = jax.device_put([np.stack(a) for a in zip(*layers, strict=True)])

    def loop(operands):
        return jax.lax.map(lambda layer: by(algorithm)(*layer), operands)

    call = jax.jit(loop, compiler_options=options)
    expected = [xla(*layer)[0] for layer in layers]
    for _ in range(20):
        y, stats = call(operands)
        for i in range(len(layers)):
            assert relative_error(y[i], expected[i]) < 1e-2
            assert relative_error(y[i][7], expected[i][7]) < 1e-2
        assert np.all(np.isfinite(stats.l1))


@every_algorithm
def test_counts_at_and_above_the_capacity_of_a_tile(back_end, algorithm):
    x, w_gate, *_ = operands = draw_for(algorithm)
    x[:, [0, 1, -1]] = w_gate[...] = 0
    x[0, 0] = w_gate[:31, 0] = 1
    x[1, 1] = w_gate[256:288, 1] = 1
    y, stats = assert_exact(operands, algorithm)
    assert int(stats.max_nnz) == 32 and np.sum(stats.fired) == 31 + 32
    assert not np.any(y[2:])


@every_algorithm
def test_all_zero(back_end, algorithm):
    operands = draw_for(algorithm, threshold=1000)
    y, stats = run(algorithm, *operands)
    assert not np.any(y) and stats.nnz == 0 and stats.l1 == 0 and not np.any(stats.fired)


@pytest.mark.sampled(1)
@either_form
# A union_target needs no more than one tile.
@pytest.mark.parametrize("m", [pytest.param(256, marks=pytest.mark.slow), 700])
def test_unions_and_dense_blocks_measure_the_capacity_that_a_pattern_needs(back_end, m, gated):
    operands, active = draw_exact(m, 128, 640, gated=gated)
    expected = shares(active)
    assert 0.3 < expected[0] < 0.9 and 0.3 < expected[1] < 0.9
    for _, stats in (*(run(name, *operands) for name in ("unions", "dense_block")), xla(*operands)):
        np.testing.assert_allclose((stats.union, stats.listed), expected, rtol=1e-6)
        np.testing.assert_array_equal(stats.tiles, fired_tiles(active))


@pytest.mark.sampled(2)
@either_form
@pytest.mark.parametrize(
    ("implementation", "served"), [("mosaic", "unions, by mosaic"), ("xla", "dense, by xla")]
)
def test_a_tile_with_live_neurons_is_measured(back_end, implementation, served, gated):
    """The dense block, which serves so few tokens else, computes all neurons."""
    operands, active = draw_exact(256, 128, 640, gated=gated)
    active[:, 300:] = False
    ffn = functools.partial(sparse_ffn, implementation=implementation, live=300)
    assert served in explain(*operands, implementation=implementation, live=300)
    _, stats = jax.jit(ffn)(*operands)
    np.testing.assert_allclose((stats.union, stats.listed), shares(active), rtol=1e-6)


@pytest.mark.parametrize("algorithm", ["few_tokens", "twell"])
def test_the_other_kernels_do_not_measure_it(back_end, algorithm):
    _, stats = run(algorithm, *draw_for(algorithm))
    assert stats.union == stats.listed == NOT_MEASURED
    few = algorithm == "few_tokens"  # which are one tile
    np.testing.assert_array_equal(stats.tiles, stats.fired if few else NOT_MEASURED)


@pytest.mark.sampled(6)
@every_algorithm
@pytest.mark.parametrize(
    ("poison", "feature"),  # with the last feature all gates are active (-inf) or zero (inf)
    [(np.nan, 5), (np.inf, 5), (np.inf, -1), (-np.inf, -1)],
)
def test_poison_spreads_as_in_the_dense_computation(back_end, algorithm, feature, poison):
    operands = draw_for(algorithm)
    operands[0][1, feature] = poison
    y, stats = run(algorithm, *operands)
    dense, dense_stats = xla(*operands)
    np.testing.assert_array_equal(np.isnan(y), np.isnan(dense))
    exact, _ = xla(*in_float32(operands))
    assert relative_error(*(np.delete(a, 1, axis=0) for a in (y, exact))) < 5e-3
    assert not np.isfinite(stats.l1) and not np.isfinite(dense_stats.l1)


def test_statistics_that_nobody_asks_for_are_not_computed(reference_kernels):
    operands, ffn = draw_for("twell"), by("twell")

    def asks_for_what_fired(function):
        return "pred[640]" in jax.jit(function).lower(*operands).compile().as_text()

    assert asks_for_what_fired(ffn)
    assert not asks_for_what_fired(lambda *operands: ffn(*operands)[0])


def test_the_capacity_that_nobody_asks_for_is_not_computed():
    """Dense training pays for it in runs alone that plan their gradients."""
    x, *weights = draw(700, 128, 640)
    layers = [np.stack(2 * [w]) for w in weights]

    def loss(wanted, layers, x):
        def layer(x, weights):
            y, stats = xla(x, *weights)
            return x + y, {name: getattr(stats, name) for name in wanted}

        y, stats = jax.lax.scan(layer, x, layers)
        return jnp.sum(y.astype(jnp.float32)), stats

    def computes(*wanted):
        gradient = jax.jit(jax.grad(functools.partial(loss, wanted), has_aux=True))
        return "[3,256,10,64]" in gradient.lower(layers, x).compile().as_text()

    assert computes("nnz", "union") and computes("listed")
    assert not computes("nnz", "fired", "l1")


@pytest.mark.sampled(1)
@either_form
def test_over_a_mesh_weights_are_gathered_once_and_tokens_stay(reference_kernels, gated):
    operands = draw(8 * 100, 128, 256, gated=gated)
    operands[0][5, -1] = -1
    mesh = make_mesh((4, 2), TOKENS[0])
    with jax.set_mesh(mesh):
        x, *weights = place(mesh, operands, [TOKENS, *3 * [COLUMNS]])
        compiled = jax.jit(by("twell")).lower(x, *weights).compile()
        y, stats = compiled(x, *weights)
    collectives = [
        name
        for line in compiled.as_text().splitlines()
        for name in ("all-gather", "all-to-all", "collective-permute")
        if f" {name}(" in line
    ]
    assert collectives == ["all-gather"] * (3 if gated else 2)
    assert y.sharding.is_equivalent_to(NamedSharding(mesh, TOKENS), y.ndim)
    y_alone, alone = xla(*operands)
    assert (stats.tiles < 0).all()
    alone = dataclasses.replace(alone, union=NOT_MEASURED, listed=NOT_MEASURED, tiles=stats.tiles)
    assert relative_error(y, y_alone) < 5e-3
    for ours, theirs in zip(*map(jax.tree.leaves, (stats, alone)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=5e-3)


@pytest.mark.sampled(1)
@either_form
def test_the_default_for_few_tokens_under_vmap_is_dense(reference_kernels, gated):
    models = [draw(5, 128, 256, gated=gated) for _ in range(3)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *models)
    _, *weights = models[0]
    for x, *mapped in (stacked, [stacked[0], *weights]):
        axes = (0, *(0 if a is not None and a.ndim == 3 else None for a in mapped))
        ours, dense = (jax.jit(jax.vmap(f, in_axes=axes))(x, *mapped) for f in (sparse_ffn, xla))
        jax.tree.map(np.testing.assert_array_equal, ours, dense)

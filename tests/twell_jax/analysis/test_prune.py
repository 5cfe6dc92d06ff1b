"""Pruned models beside the original, the masked and the masked and sorted one."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from twell_jax import SparseMLP, quantise_mlps
from twell_jax.analysis.activity import activity_patterns, measure_activity
from twell_jax.analysis.prune import fires_removed, prune_dead, prune_mlp
from twell_jax.models import graphdef

SMALL = drawn.SMALL | {"d_model": 64, "layers": 3, "d_ff": 512, "init_scale": 0.2}
forward = nnx.jit(lambda model, tokens: model(tokens)[0])


def make(**changes):
    """A model with a constant feature by which its neurons are active often, rarely or never."""
    model = drawn.transformer(**SMALL | changes)
    mlp = model.blocks.mlp
    gate = mlp.w_gate if mlp.w_gate is not None else mlp.w_up
    set_first_feature(model.embed.embedding, 4.0)
    set_first_feature(gate, -seeds.rng().uniform(0.2, 2.0, gate.shape[:2]))
    for weights in (mlp.w_down, model.blocks.attention.out.kernel):  # it stays constant
        set_first_feature(weights, 0.0)
    return model


def set_first_feature(param, values):
    weights = np.array(param)
    weights[..., 0] = values
    param.set_value(jnp.asarray(weights))


def draw_sequences(count, length=17):
    return seeds.rng().integers(0, 61, (count, length))


def usage_on(count, model):
    """Counted on `count` sequences, repeated to the shape in which all tests compile the model."""
    sequences = np.resize(draw_sequences(count), (200, 17))
    return measure_activity(model, sequences, batch=200).usage


def with_mlp(model, change, **config):
    """A copy whose feed-forward weights [layers, d_ff, d_model] are changed."""
    params = nnx.state(model)
    mlp = jax.tree.map(change, params["blocks"]["mlp"])
    params = nnx.merge_state(params, nnx.State({"blocks": {"mlp": mlp}}))
    return nnx.merge(graphdef(model.config.model_copy(update=config)), params)


def prune(model, usage, **options):
    params, config, report = prune_dead(nnx.state(model), model.config, usage, **options)
    return nnx.merge(graphdef(config), params), report


def kept_mask(model, report):
    mask = np.zeros((model.config.layers, model.config.d_ff), bool)
    for layer, (neurons, kept) in enumerate(zip(report.neurons, report.kept, strict=True)):
        mask[layer, neurons[:kept]] = True
    return mask


@pytest.mark.parametrize(
    ("gated", "dtype"), [(True, "float32"), pytest.param(False, "bfloat16", marks=pytest.mark.slow)]
)
def test_outputs_stay_until_a_removed_neuron_fires(gated, dtype):
    model = make(gated=gated, dtype=dtype)
    usage = usage_on(8, model)
    pruned, report = prune(model, usage)
    assert 128 <= pruned.config.d_ff < 512
    mask = kept_mask(model, report)
    masked = with_mlp(model, lambda w: jnp.asarray(np.where(mask[..., None], w, 0)))

    sequences = draw_sequences(200)
    tokens = sequences[:, :-1]
    # The same shapes as below, so that no activation next to zero is rounded differently.
    fires = fires_removed(model, report, sequences, batch=200).any(0)
    changed = np.logical_or.accumulate(fires, axis=1)  # from the first of a sequence on
    assert changed.any() and not changed.all()
    original, zeroed, found = (np.asarray(forward(m, tokens)) for m in (model, masked, pruned))
    np.testing.assert_array_equal(original[~changed], zeroed[~changed])

    def error(where):
        difference = np.linalg.norm(found[where] - original[where])
        return difference / np.linalg.norm(original[where])

    rounding = {"float32": 2e-6, "bfloat16": 2e-2}[dtype]
    assert error(~changed) < rounding
    if dtype == "float32":
        assert error(fires) > 10 * rounding


@pytest.mark.sampled(1)
@pytest.mark.parametrize(("gated", "dtype"), [(True, "float32"), (False, "bfloat16")])
def test_the_pruned_model_is_bitwise_the_masked_and_sorted_one(gated, dtype):
    model = make(gated=gated, dtype=dtype)
    usage = usage_on(4, model)
    pruned, report = prune(model, usage)
    mask = kept_mask(model, report)
    removed = [np.setdiff1d(np.arange(512), neurons) for neurons in report.neurons]
    order = np.concatenate([report.neurons, removed], axis=1)

    def mask_and_sort(weights):
        masked = np.where(mask[..., None], weights, 0)
        return jnp.asarray(np.take_along_axis(masked, order[..., None], axis=1))

    masked = with_mlp(model, mask_and_sort)
    tokens = draw_sequences(200)[:, :-1]
    assert pruned.config.d_ff < masked.config.d_ff
    np.testing.assert_array_equal(forward(pruned, tokens), forward(masked, tokens))


def test_all_that_fired_remain_from_the_most_used_on():
    model, rng = make(d_ff=40), seeds.rng()
    usage = rng.integers(1, 1000, (3, 40))
    for layer, live in enumerate([5, 17, 11]):
        usage[layer, rng.permutation(40)[live:]] = 0
    before = jax.tree.map(np.array, nnx.state(model))
    pruned, report = prune(model, usage, multiple=8)
    assert pruned.config == model.config.model_copy(update={"d_ff": 24, "live_width": True})
    np.testing.assert_array_equal(report.kept, [8, 24, 16])
    np.testing.assert_array_equal(pruned.blocks.mlp.live[...], report.kept)
    np.testing.assert_array_equal(report.live, [5, 17, 11])
    for layer, neurons in enumerate(report.neurons):
        assert len(set(neurons.tolist())) == 24
        counts = usage[layer, neurons]
        np.testing.assert_array_equal(counts, np.sort(usage[layer])[::-1][:24])
        for name in ("w_gate", "w_up", "w_down"):
            old, new = (np.asarray(getattr(m.blocks.mlp, name)) for m in (model, pruned))
            np.testing.assert_array_equal(new[layer], old[layer, neurons])
    jax.tree.map(np.testing.assert_array_equal, before, nnx.state(model))


@pytest.mark.parametrize(("live", "multiple", "width"), [(40, 128, 40), (33, 16, 40), (0, 16, 16)])
def test_the_width_is_a_multiple_within_the_model(live, multiple, width):
    usage = np.arange(40) < np.array([[live], [0], [live]])  # only whether a neuron fired
    pruned, report = prune(make(d_ff=40), usage, multiple=multiple)
    assert pruned.config.d_ff == width
    np.testing.assert_array_equal(report.live, [live, 0, live])


def test_neurons_that_a_layer_does_not_need_never_fire():
    model = make(d_ff=40)
    usage = seeds.rng().integers(1, 9, (3, 40)) * (np.arange(40) < np.array([[9], [40], [0]]))
    pruned, report = prune(model, usage, multiple=1)
    np.testing.assert_array_equal(report.kept, [9, 40, 0])
    _, stats = nnx.jit(lambda model, tokens: model(tokens))(pruned, draw_sequences(20)[:, :-1])
    assert not any(stats.fired[layer, live:].any() for layer, live in enumerate(report.live))
    assert stats.fired[1].any() and not stats.nnz[2]


def test_there_are_no_numbers_where_nothing_is_left_out():
    model = make(d_ff=40)
    pruned, report = prune(model, np.ones((3, 40)))
    assert pruned.config == model.config and not report.leaves_out
    tokens = draw_sequences(20)[:, :-1]
    np.testing.assert_array_equal(forward(pruned, tokens), forward(model, tokens))
    numbered, report = prune(model, np.arange(40) < np.array([[9], [24], [20]]), multiple=8)
    assert numbered.config.live_width and report.leaves_out
    even, _ = prune(numbered, np.arange(24) < np.array([[7], [8], [1]]), multiple=8)
    assert even.config == model.config.model_copy(update={"d_ff": 8})
    assert even.blocks.mlp.live is None


def test_a_pruned_model_can_be_pruned_again():
    model = make(d_ff=40)
    first, report = prune(model, np.arange(40) < np.array([[9], [30], [20]]), multiple=1)
    rounded, _ = prune(first, np.arange(30) < np.array([[9], [13], [5]]), multiple=8)
    np.testing.assert_array_equal(rounded.blocks.mlp.live[...], [9, 16, 8])  # none revives
    again, second = prune(first, np.arange(30) < np.array([[4], [7], [5]]), multiple=1)
    assert again.config.d_ff == 7
    np.testing.assert_array_equal(again.blocks.mlp.live[...], [4, 7, 5])
    for layer in range(3):
        kept = report.neurons[layer][second.neurons[layer]]
        np.testing.assert_array_equal(
            again.blocks.mlp.w_up[layer], model.blocks.mlp.w_up[layer][kept]
        )


@pytest.mark.sampled(3)
@pytest.mark.parametrize(("live", "multiple", "width"), [(9, 4, 12), (40, 128, 40), (0, 4, 4)])
@pytest.mark.parametrize("gated", [True, False])
def test_a_module_of_its_own_gets_smaller(live, multiple, width, gated):
    rng = seeds.rng()
    mlp = SparseMLP(8, 40, gated=gated, use_bias=True, rngs=nnx.Rngs(seeds.integer()))
    x = rng.standard_normal((30, 8), np.float32)
    gate = mlp.b_gate if gated else mlp.b_up
    order = rng.permutation(40)
    gate[...] = jnp.asarray(np.where(np.isin(np.arange(40), order[:live]), 9.0, -99.0))
    expected, stats = jax.device_get(jax.jit(functools.partial(mlp, return_stats=True))(x))
    assert stats.fired.sum() == live
    neurons = prune_mlp(mlp, stats.fired * rng.integers(1, 9, 40), multiple=multiple)
    assert mlp.w_up.shape == mlp.w_down.shape == (width, 8)
    assert (mlp.live is None) == (live > 0)  # the width is that of the active neurons
    assert live or mlp.live[...] == 0
    np.testing.assert_allclose(jax.jit(mlp)(x), expected, rtol=1e-4, atol=1e-4)
    assert set(neurons[:live]) == set(order[:live]) and len(neurons) == width


def test_modules_that_cannot_be_pruned_alone_are_named():
    mlp = SparseMLP(8, 40, rngs=nnx.Rngs(0))
    with pytest.raises(ValueError, match=r"usage must be \[40\], got \[3, 40\]"):
        prune_mlp(mlp, np.ones((3, 40)))
    with pytest.raises(ValueError, match=r"stacked, \[3, 40, 64\].* prune_dead"):
        prune_mlp(make(d_ff=40).blocks.mlp, np.ones(40))


@pytest.mark.parametrize(
    ("projections", "names"), [(("gate", "up"), "w_gate and w_up"), (("down",), "w_down")]
)
def test_quantised_blocks_are_refused_before_anything_changes(projections, names):
    says = f"^the {names} of a feed-forward block are quantised; prune the model first, .*"
    model = make(d_ff=40)
    quantise_mlps(model, projections)
    with pytest.raises(ValueError, match=says):
        prune(model, np.ones((3, 40)))
    mlp = SparseMLP(8, 40, rngs=nnx.Rngs(0))
    quantise_mlps(mlp, projections)
    with pytest.raises(ValueError, match=says) as error:
        prune_mlp(mlp, np.arange(40))
    assert "\n" not in str(error.value)
    assert mlp.live is None and mlp.w_up.shape == (40, 8)


def test_biases_go_with_their_neurons():
    model = make(d_ff=40, mlp_bias=True)
    pruned, report = prune(model, seeds.rng().integers(0, 2, (3, 40)), multiple=1)
    before, after = model.blocks.mlp, pruned.blocks.mlp
    for layer, neurons in enumerate(report.neurons):
        for name in ("b_gate", "b_up"):
            expected = np.asarray(getattr(before, name))[layer][neurons]
            np.testing.assert_array_equal(getattr(after, name)[layer], expected)
    np.testing.assert_array_equal(after.b_down[...], before.b_down[...])


def test_tokens_that_fire_a_removed_neuron_are_told_one_by_one():
    model = make(d_ff=40)
    usage = measure_activity(model, draw_sequences(1), batch=1).usage
    _, report = prune(model, usage, multiple=1)
    sequences = draw_sequences(7)
    fired = np.concatenate([f for _, f in activity_patterns(model, sequences, batch=3)], axis=1)
    removed = ~kept_mask(model, report)
    expected = [fired[layer][..., removed[layer]].any(-1) for layer in range(3)]
    found = fires_removed(model, report, sequences, batch=3)
    np.testing.assert_array_equal(found, expected)
    assert found.shape == (3, 7, 16)


@pytest.mark.parametrize(
    ("shape", "multiple", "message"),
    [
        ((2, 40), 8, r"usage must be .* \[3, 40\], got \[2, 40\]"),
        ((3, 40), 0, "multiple must"),
        ((3, 40), True, "multiple must be an integer of at least 1, got True"),
    ],
)
def test_bad_arguments_are_named(shape, multiple, message):
    with pytest.raises(ValueError, match=message):
        prune(make(d_ff=40), np.ones(shape), multiple=multiple)


def test_shares_of_tokens_say_as_much_as_counts():
    usage = np.zeros(256)
    usage[200:] = 0.25
    kept = prune_mlp(SparseMLP(8, 256, rngs=nnx.Rngs(0)), usage)
    assert {*range(200, 256)} <= {*np.asarray(kept).tolist()}

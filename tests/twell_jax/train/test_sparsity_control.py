"""The controller of the L1 coefficient: its bounds, what it does on bad statistics, and on plants.

A plant stands for the model: its non-zeros and its U follow the coefficient late, and with noise.
"""

import dataclasses
import functools
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests import seeds
from twell_jax import config
from twell_jax.ffn.stats import NOT_MEASURED
from twell_jax.train.sparsity_control import (
    LEAST,
    MOST,
    MOST_MULTIPLIER,
    SparsityControl,
    first_control,
    out_of_reach,
    update,
)

LAYERS, D_FF, STEPS, TARGET = 4, 512, 600, 20.0
TARGETS = (  # of non-zeros, of U, of both
    {"sparsity_target": TARGET},
    {"sparsity_target": None, "union_target": 0.3},
    {"sparsity_target": TARGET, "union_target": 0.3},
)


def settings(**changes):
    tree = {"run_dir": "unused", "steps": STEPS, "batch_tokens": 256, "micro_batch": 1}
    tree |= {"sparsity_target": TARGET, "model": {"vocab_size": 257, "context": 256, "d_model": 32}}
    tree["model"] |= {"layers": LAYERS, "heads": 4, "d_ff": D_FF}
    return config.from_dict(tree | changes)


@functools.cache
def with_unions(targets):
    """The compiled update of a run with `TARGETS[targets]`."""
    return jax.jit(functools.partial(update, config=settings(**TARGETS[targets])))


@functools.cache
def compiled(warm_up=0):
    """The compiled update of a run with a target of non-zeros alone, which needs no U."""
    run, union = settings(l1_warmup=[0, warm_up]), jnp.full(LAYERS, NOT_MEASURED)
    return jax.jit(lambda control, nnz, l1, step: update(control, nnz, union, l1, step, run))


def arrays(*values):
    return [jnp.asarray(value, jnp.float32) for value in values]


anything = st.floats(0, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf, -1.0])
of_layers = st.lists(anything, min_size=LAYERS, max_size=LAYERS)


def controls(targets):
    """Controllers of a run with `TARGETS[targets]`."""
    statistics = st.tuples(*[(st.floats(1, D_FF), st.floats(0.01, 1))[i] for i in _WHICH[targets]])
    return st.builds(
        lambda *fields: SparsityControl(*arrays(*fields)),
        st.floats(math.log(LEAST), math.log(MOST)),
        st.lists(st.floats(-0.69, 0.69), min_size=LAYERS, max_size=LAYERS),
        statistics,
        statistics,
    )


_WHICH = [0], [1], [0, 1]
runs = st.sampled_from(range(len(TARGETS)))
shares = st.lists(st.floats(0, 1), min_size=LAYERS, max_size=LAYERS)


def coefficient(control):
    return math.exp(control.log_coefficient)


@given(st.data(), runs, of_layers, of_layers, of_layers)
def test_whatever_was_measured_the_coefficient_moves_a_little_between_its_bounds(
    data, targets, nnz, union, l1
):
    control = data.draw(controls(targets))
    after = with_unions(targets)(control, *arrays(nnz, union, l1), 5)
    assert LEAST * 0.999 <= coefficient(after) <= MOST * 1.001
    assert 0.9 < coefficient(after) / coefficient(control) < 1.1
    multipliers = np.exp(after.log_multipliers)
    assert np.all((multipliers > 0.999 / MOST_MULTIPLIER) & (multipliers < 1.001 * MOST_MULTIPLIER))
    found = [(nnz, union)[i] for i in _WHICH[targets]]
    if not np.isfinite([nnz, l1, *found]).all() or np.less(found, 0).any():
        assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(control)))


@given(st.data(), runs, shares, shares, st.floats(0, 0.2), st.floats(0, 0.2))
def test_neither_more_non_zeros_nor_a_larger_union_lower_the_coefficient(
    data, targets, open_gates, union, more_nnz, more_union
):
    control, gates = data.draw(controls(targets)), np.array(open_gates)
    fewer, many = (
        with_unions(targets)(control, *arrays(D_FF * nnz, u, D_FF * gates), 5)
        for nnz, u in ((gates, union), (gates + more_nnz, np.array(union) + more_union))
    )
    assert coefficient(many) >= coefficient(fewer)


@given(st.data(), shares, shares)
def test_of_two_targets_the_one_that_asks_for_the_larger_coefficient_is_followed(
    data, open_gates, union
):
    control, nnz = data.draw(controls(targets=2)), D_FF * np.array(open_gates)
    alone = []
    for i in (0, 1):
        of_one = dataclasses.replace(
            control, measured=control.measured[i : i + 1], earlier=control.earlier[i : i + 1]
        )
        alone.append(coefficient(with_unions(i)(of_one, *arrays(nnz, union, nnz), 5)))
    both = with_unions(2)(control, *arrays(nnz, union, nnz), 5)
    assert coefficient(both) == pytest.approx(max(alone), rel=1e-5)


@given(st.permutations([3.0, 11.0, 50.0, 200.0]))
def test_the_order_of_layers_means_nothing_to_the_coefficient(nnz):
    one, other = (
        compiled()(first_control(settings()), *arrays(n, nnz), 5) for n in (nnz, nnz[::-1])
    )
    assert coefficient(one) == pytest.approx(coefficient(other), rel=1e-6)


def test_it_starts_from_the_given_coefficient_and_is_not_raised_during_warm_ups():
    assert first_control(settings(sparsity_target=None)) is None
    start = first_control(settings(l1_coefficient=3e-4, l1_warmup=[0, 50]))
    assert coefficient(start) == pytest.approx(3e-4)
    assert coefficient(first_control(settings())) == pytest.approx(1e-5)
    for l1_end, lr_end in ((50, 30), (10, 50)):
        warm_ups = {"l1_warmup": [0, l1_end], "optimizer": {"warmup_steps": lr_end}}
        assert settings(**warm_ups).sparsity_control_start == 50
    update = compiled(warm_up=50)
    too_many, too_few = arrays([400.0] * LAYERS), arrays([1.0] * LAYERS)
    for step, nnz, compare in (
        (49, too_many, float.__eq__),
        (50, too_many, float.__gt__),
        (49, too_few, float.__lt__),
    ):
        control = start
        for _ in range(60):
            control = update(control, *nnz, *nnz, step)
        assert compare(coefficient(control), coefficient(start))


def test_a_bound_winds_nothing_up():
    control, silent = first_control(settings()), arrays([0.0] * LAYERS)
    for step in range(5 * STEPS):
        control = compiled()(control, *silent, *silent, step)
    assert coefficient(control) == pytest.approx(LEAST)
    many = arrays([400.0] * LAYERS)
    for step in range(60):
        control = compiled()(control, *many, *many, step)
    assert coefficient(control) > 2 * LEAST


def test_noise_is_smoothed_over_a_twelfth_of_a_horizon_and_a_trend_seen_over_a_quarter():
    control, measured = first_control(settings()), []
    for step in range(200):  # a mean over n steps is n - 1 steps behind what grows evenly
        layers = jnp.full(LAYERS, 100.0 + step)
        control = compiled()(control, layers, layers, step)
        measured.append(float(control.measured[0]))
    horizon = STEPS // 10
    assert measured[-1] == pytest.approx(100 + step - (horizon // 12 - 1), rel=1e-4)
    steps = horizon // 4
    assert control.earlier[0] == pytest.approx(measured[-1 - (steps - 1)], rel=1e-4)


def test_a_non_zero_costs_the_same_in_every_layer():
    control, (nnz, l1) = first_control(settings()), arrays([80, 4, 10, 40], [40, 4, 10, 20])
    at_first = compiled()(control, nnz, l1, 0).log_multipliers
    for step in range(STEPS):
        control = compiled()(control, nnz, l1, step)
    # A step goes so much of the way: over a horizon, which is a tenth of the run.
    np.testing.assert_allclose(at_first, control.log_multipliers / (STEPS / 10), rtol=1e-3)
    cost = np.exp(control.log_multipliers) * l1 / nnz
    np.testing.assert_allclose(cost, cost[0], rtol=1e-3)
    assert np.mean(control.log_multipliers) == pytest.approx(0, abs=1e-3)
    # A layer that dies has no size; the others keep their proportions.
    for step in range(STEPS):
        control = compiled()(control, nnz.at[1].set(0), l1.at[1].set(0), step)
    multipliers = np.exp(control.log_multipliers)
    assert multipliers[1] == pytest.approx(1, abs=1e-3)
    assert multipliers[2] / multipliers[0] == pytest.approx(0.5, rel=1e-3)


@functools.partial(jax.jit, static_argnames="targets")
def on_a_plant(control, key, lag, slope, first, spikes, targets=0):
    """Non-zeros and U of all steps: they relax towards what falls with a power of the coefficient.

    U grows with the non-zeros of a layer, and saturates at 1.
    """
    shares, run = jnp.array([2.0, 0.3, 0.5, 1.2]), settings(**TARGETS[targets])

    def step(carry, i):
        control, log_nnz = carry
        wanted = math.log(D_FF / 2) - slope * jnp.log1p(jnp.exp(control.log_coefficient) / first)
        log_nnz = log_nnz + (wanted - log_nnz) / lag
        noise = 0.05 * jax.random.normal(jax.random.fold_in(key, i))
        measured = shares * jnp.exp(log_nnz + noise) * spikes[i]
        union = -jnp.expm1(-measured / 40)
        control = update(control, measured, union, measured, i, run)
        nnz = jnp.exp(log_nnz)
        return (control, log_nnz), (nnz, jnp.mean(-jnp.expm1(-shares * nnz / 40)))

    carry = control, jnp.log(jnp.float32(D_FF / 2))
    return jax.lax.scan(step, carry, jnp.arange(STEPS))[1]


def non_zeros_and_unions(lag, slope, spikes, targets=0):
    key = jax.random.key(seeds.rng().integers(2**31))
    for first in (1e-5, 1e-4, 1e-3):
        control = first_control(settings(l1_coefficient=first / 10, **TARGETS[targets]))
        yield map(np.asarray, on_a_plant(control, key, lag, slope, first, spikes, targets))


@pytest.mark.parametrize("slope", [0.5, 1.0])
@pytest.mark.parametrize("lag", [3.0, 20.0, 60.0])
def test_it_reaches_the_target_within_a_tenth_and_holds_it(lag, slope):
    for nnz, _ in non_zeros_and_unions(lag, slope, spikes=jnp.ones(STEPS)):
        np.testing.assert_allclose(nnz[STEPS * 2 // 3 :], TARGET, rtol=0.1)


@pytest.mark.parametrize("targets", [1, 2])
@pytest.mark.parametrize("lag", [3.0, 20.0, 60.0])
def test_a_union_is_reached_and_held_and_the_easier_target_undercut(lag, targets):
    for nnz, union in non_zeros_and_unions(lag, 0.5, jnp.ones(STEPS), targets):
        np.testing.assert_allclose(union[STEPS * 2 // 3 :], 0.3, rtol=0.1)
        assert (nnz[STEPS * 2 // 3 :] < TARGET).all()


def test_neither_spikes_nor_lost_statistics_carry_it_away():
    spikes = jnp.ones(STEPS).at[420:423].set([50, jnp.nan, 0])
    spikes = spikes.at[jnp.arange(520, 525)].set(jnp.inf)
    for nnz, _ in non_zeros_and_unions(lag=20.0, slope=1.0, spikes=spikes):
        np.testing.assert_allclose(nnz[STEPS * 6 // 10 :], TARGET, rtol=0.2)
        np.testing.assert_allclose(nnz[-50:], TARGET, rtol=0.1)


@pytest.mark.parametrize(("nnz", "bound", "says"), [
    (D_FF / 2, MOST, "10, and still 256.0 neurons are active for a token, not 20; .* larger"),
    (1.0, LEAST, "1e-08, and only 1.0 neurons are active for a token, not 20; .* smaller"),
])  # fmt: skip
def test_a_target_out_of_reach_is_named_once_the_coefficient_is_at_its_bound(nnz, bound, says):
    run = settings(l1_warmup=[0, 10])
    control, step, found = first_control(run), 0, {"sparsity_target": nnz}
    layers = jnp.full(LAYERS, nnz)
    while out_of_reach(run, step, coefficient(control), found) is None:
        assert step < 5000
        control, step = compiled(10)(control, layers, layers, step), step + 1
    why = out_of_reach(run, step, coefficient(control), found)
    assert re.search(f"its bound {says}", why) and "\n" not in why
    np.testing.assert_allclose(coefficient(control), bound, rtol=2e-3)
    met = {"sparsity_target": TARGET}
    assert out_of_reach(run, step, coefficient(control), met) is None
    assert out_of_reach(run, 9, coefficient(control), found) is None  # while warming up


def test_of_two_targets_the_one_that_is_out_of_reach_is_named():
    run = settings(**TARGETS[2])
    found = {"sparsity_target": 2.0, "union_target": 0.5}
    assert out_of_reach(run, 0, LEAST, found) is None  # as U is exceeded
    assert out_of_reach(run, 0, MOST, found) == (
        "union_target: the L1 coefficient has reached its bound 10, and still 256 neighbouring "
        "tokens use 50.0% of the neurons, not 30.0%; start again with a larger target"
    )
    found["union_target"] = 0.25
    assert out_of_reach(run, 0, MOST, found) is None
    assert out_of_reach(run, 0, LEAST, found).startswith("sparsity_target: the L1 coefficient")

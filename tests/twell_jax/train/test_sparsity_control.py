"""The controller of the L1 coefficient: its bounds, what it does on bad statistics, and on plants.

A plant stands for the model: its non-zeros follow the coefficient late, and with noise.
"""

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


def settings(**changes):
    tree = {"run_dir": "unused", "steps": STEPS, "batch_tokens": 32, "micro_batch": 1}
    tree |= {"sparsity_target": TARGET, "model": {"vocab_size": 257, "context": 32, "d_model": 32}}
    tree["model"] |= {"layers": LAYERS, "heads": 4, "d_ff": D_FF}
    return config.from_dict(tree | changes)


@functools.cache
def compiled(warm_up=0):
    run = settings(l1_warmup=[0, warm_up])
    return jax.jit(functools.partial(update, config=run))


def arrays(*values):
    return [jnp.asarray(value, jnp.float32) for value in values]


anything = st.floats(0, 1e6, width=32) | st.sampled_from([math.nan, math.inf, -math.inf])
of_layers = st.lists(anything, min_size=LAYERS, max_size=LAYERS)
controls = st.builds(
    lambda coefficient, multipliers, nnz, earlier: SparsityControl(
        *arrays(coefficient, multipliers, nnz, earlier)
    ),
    st.floats(math.log(LEAST), math.log(MOST)),
    st.lists(st.floats(-0.69, 0.69), min_size=LAYERS, max_size=LAYERS),
    st.floats(1, D_FF),
    st.floats(1, D_FF),
)


def coefficient(control):
    return math.exp(control.log_coefficient)


@given(controls, of_layers, of_layers)
def test_whatever_was_measured_the_coefficient_moves_a_little_between_its_bounds(control, nnz, l1):
    after = compiled()(control, *arrays(nnz, l1), 5)
    assert LEAST * 0.999 <= coefficient(after) <= MOST * 1.001
    assert 0.9 < coefficient(after) / coefficient(control) < 1.1
    multipliers = np.exp(after.log_multipliers)
    assert np.all((multipliers > 0.999 / MOST_MULTIPLIER) & (multipliers < 1.001 * MOST_MULTIPLIER))
    if not np.isfinite([*nnz, *l1]).all():
        assert all(map(np.array_equal, jax.tree.leaves(after), jax.tree.leaves(control)))


@given(controls, st.lists(st.floats(0, D_FF), min_size=LAYERS, max_size=LAYERS), st.floats(0, 99))
def test_more_non_zeros_never_lower_the_coefficient(control, nnz, more):
    fewer, many = (
        compiled()(control, *arrays(n, nnz), 5) for n in (nnz, [*nnz[1:], nnz[0] + more])
    )
    assert coefficient(many) >= coefficient(fewer)


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


def test_a_non_zero_costs_the_same_in_every_layer():
    control, (nnz, l1) = first_control(settings()), arrays([80, 4, 10, 40], [40, 4, 10, 20])
    for step in range(STEPS):
        control = compiled()(control, nnz, l1, step)
    cost = np.exp(control.log_multipliers) * l1 / nnz
    np.testing.assert_allclose(cost, cost[0], rtol=1e-3)
    assert np.mean(control.log_multipliers) == pytest.approx(0, abs=1e-3)
    # A layer that dies has no size; the others keep their proportions.
    for step in range(STEPS):
        control = compiled()(control, nnz.at[1].set(0), l1.at[1].set(0), step)
    multipliers = np.exp(control.log_multipliers)
    assert multipliers[1] == pytest.approx(1, abs=1e-3)
    assert multipliers[2] / multipliers[0] == pytest.approx(0.5, rel=1e-3)


@jax.jit
def on_a_plant(control, key, lag, slope, first, spikes):
    """The non-zeros of all steps; they relax towards what falls with a power of the coefficient."""
    shares = jnp.array([2.0, 0.3, 0.5, 1.2])

    def step(carry, i):
        control, log_nnz = carry
        wanted = math.log(D_FF / 2) - slope * jnp.log1p(jnp.exp(control.log_coefficient) / first)
        log_nnz = log_nnz + (wanted - log_nnz) / lag
        noise = 0.05 * jax.random.normal(jax.random.fold_in(key, i))
        measured = shares * jnp.exp(log_nnz + noise) * spikes[i]
        return (update(control, measured, measured, i, settings()), log_nnz), jnp.exp(log_nnz)

    carry = control, jnp.log(jnp.float32(D_FF / 2))
    return jax.lax.scan(step, carry, jnp.arange(STEPS))[1]


def non_zeros(lag, slope, spikes):
    key = jax.random.key(seeds.rng().integers(2**31))
    for first in (1e-5, 1e-4, 1e-3):
        control = first_control(settings(l1_coefficient=first / 10))
        yield np.asarray(on_a_plant(control, key, lag, slope, first, spikes))


@pytest.mark.parametrize("slope", [0.5, 1.0])
@pytest.mark.parametrize("lag", [3.0, 20.0, 60.0])
def test_it_reaches_the_target_within_a_tenth_and_holds_it(lag, slope):
    for nnz in non_zeros(lag, slope, spikes=jnp.ones(STEPS)):
        np.testing.assert_allclose(nnz[STEPS * 2 // 3 :], TARGET, rtol=0.1)


def test_neither_spikes_nor_lost_statistics_carry_it_away():
    spikes = jnp.ones(STEPS).at[420:423].set([50, jnp.nan, 0])
    spikes = spikes.at[jnp.arange(520, 525)].set(jnp.inf)
    for nnz in non_zeros(lag=20.0, slope=1.0, spikes=spikes):
        np.testing.assert_allclose(nnz[STEPS * 6 // 10 :], TARGET, rtol=0.2)
        np.testing.assert_allclose(nnz[-50:], TARGET, rtol=0.1)


@pytest.mark.parametrize(("nnz", "bound", "says"), [
    (D_FF / 2, MOST, "its bound 10, and still 256.0 neurons fire for a token, not 20; .* larger"),
    (1.0, LEAST, "its bound 1e-08, and only 1.0 neurons fire for a token, not 20; .* smaller"),
])  # fmt: skip
def test_a_target_out_of_reach_is_named_once_the_coefficient_is_at_its_bound(nnz, bound, says):
    run = settings(l1_warmup=[0, 10])
    control, step = first_control(run), 0
    layers = jnp.full(LAYERS, nnz)
    while out_of_reach(run, step, coefficient(control), nnz) is None:
        assert step < 5000
        control, step = compiled(10)(control, layers, layers, step), step + 1
    why = out_of_reach(run, step, coefficient(control), nnz)
    assert re.search(says, why) and "\n" not in why
    np.testing.assert_allclose(coefficient(control), bound, rtol=2e-3)
    assert out_of_reach(run, step, coefficient(control), TARGET) is None
    assert out_of_reach(run, 9, coefficient(control), nnz) is None  # while warming up

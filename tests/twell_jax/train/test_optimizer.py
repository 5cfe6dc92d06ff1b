"""Schedules at the steps that matter, and AdamW against its formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from tests.twell_jax.configs import VALID
from twell_jax.config import OptimizerConfig, from_dict
from twell_jax.train.optimizer import (
    l1_coefficient,
    learning_rate,
    make_optimizer,
    moved_learning_rate,
)

MODEL = {"vocab_size": 257, "context": 32, "d_model": 32, "layers": 2, "heads": 4, "d_ff": 64}


def rates(steps, **settings):
    schedule = learning_rate(OptimizerConfig(**settings), steps)
    return np.array([float(schedule(step)) for step in range(steps)])


def l1_weights(warmup, steps, stages=0):
    of_l1 = {"l1_coefficient": 2.0, "l1_warmup": warmup, "l1_stages": stages}
    return [l1_coefficient(from_dict(VALID | of_l1), step) for step in steps]


def test_l1_rises_in_stages():
    weights = l1_weights([10, 50], range(70), stages=4)
    assert weights == 10 * [0.0] + 10 * [0.5] + 10 * [1.0] + 10 * [1.5] + 30 * [2.0]


@pytest.mark.parametrize(
    ("warmup", "expected"),
    [
        ([0, 0], [2, 2, 2, 2, 2]),
        ([0, 4], [0, 0.5, 1, 1.5, 2]),
        ([1, 3], [0, 0, 1, 2, 2]),
        ([2, 2], [0, 0, 2, 2, 2]),
    ],
)
def test_l1_rises_linearly(warmup, expected):
    assert l1_weights(warmup, range(5)) == expected


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_warm_up_is_linear_from_zero(schedule):
    values = rates(100, lr=2.0, warmup_steps=20, schedule=schedule)
    np.testing.assert_allclose(values[:21], np.arange(21) / 10, rtol=1e-6)
    assert values.argmax() == 20


def test_cosine():
    values = rates(120, lr=2.0, warmup_steps=20, final_lr_fraction=0.1)
    progress = np.arange(100) / 100
    expected = 0.2 + 1.8 * (1 + np.cos(np.pi * progress)) / 2
    np.testing.assert_allclose(values[20:], expected, rtol=1e-5)


def test_warm_up_stable_decay():
    settings = {"schedule": "wsd", "decay_fraction": 0.25, "final_lr_fraction": 0.1}
    values = rates(200, lr=2.0, warmup_steps=20, **settings)
    np.testing.assert_allclose(values[20:150], 2.0)
    np.testing.assert_allclose(values[150:], 2.0 - 1.8 * np.arange(50) / 50, rtol=1e-5)


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
def test_without_warm_up_the_first_step_is_the_highest(schedule):
    assert rates(10, lr=2.0, schedule=schedule)[0] == 2.0


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("steps", [1, 5, 20])
def test_a_run_shorter_than_its_warm_up_stays_within_it(schedule, steps):
    values = rates(steps, lr=2.0, warmup_steps=20, schedule=schedule)
    np.testing.assert_allclose(values, np.arange(steps) / 10, rtol=1e-6)


def test_decay_longer_than_what_warm_up_leaves_starts_behind_it():
    values = rates(30, lr=2.0, warmup_steps=20, schedule="wsd", decay_fraction=1.0)
    assert values[20] == 2.0
    assert np.all(np.diff(values[20:]) < 0)


def test_a_run_that_goes_on_with_more_steps_says_what_that_does_to_the_learning_rate():
    runs = [from_dict(VALID | {"steps": steps}) for steps in (100, 200)]
    assert moved_learning_rate(*runs, step=100) == (
        "steps: 100 -> 200, so by its schedule the learning rate at step 100 moves from 0.0001 to "
        "0.00055"
    )
    assert moved_learning_rate(runs[0], runs[0], step=50) is None
    assert moved_learning_rate(runs[1], runs[0], step=100) is None  # which shows its result


def test_with_a_target_the_factor_of_the_controllers_coefficient_rises_in_the_same_way():
    run = from_dict(VALID | {"l1_coefficient": 2.0, "l1_warmup": [2, 6], "sparsity_target": 9})
    assert [l1_coefficient(run, step) for step in (0, 2, 5, 6, 9)] == [0, 0, 0.75, 1, 1]


@pytest.fixture(scope="module")
def params():
    return nnx.state(
        drawn.transformer(**MODEL, tie_embeddings=False, norm="layer", mlp_bias=True), nnx.Param
    )


def named(params):
    return {
        ".".join(path): np.asarray(leaf.get_value()) for path, leaf in nnx.to_flat_state(params)
    }


def is_matrix(name):
    return name.split(".")[-1] not in ("scale", "bias", "b_gate", "b_up", "b_down")


def test_weight_decay_shrinks_matrices_alone(params):
    optimizer = make_optimizer(OptimizerConfig(lr=0.5, weight_decay=0.1), steps=10)
    zeros = jax.tree.map(np.zeros_like, params)
    updates, _ = jax.jit(lambda p: optimizer.update(zeros, optimizer.init(p), p))(params)
    changes, before = named(updates), named(params)
    kept = {name for name, change in changes.items() if not change.any()}
    assert kept == {name for name in changes if not is_matrix(name)}
    for name in set(changes) - kept:
        np.testing.assert_allclose(changes[name], -0.05 * before[name], rtol=1e-5)


def test_two_steps_are_adamw_on_clipped_gradients(params):
    settings = OptimizerConfig(lr=1e-2, clip_norm=0.5, b1=0.8, b2=0.9, eps=1e-6, weight_decay=0.2)
    optimizer = make_optimizer(settings, steps=10)
    rng = seeds.rng()

    @jax.jit
    def update(params, state, grads):
        updates, state = optimizer.update(grads, state, params)
        return jax.tree.map(jnp.add, params, updates), state

    state = jax.jit(optimizer.init)(params)
    p = {k: v.astype(float) for k, v in named(params).items()}
    m, v = dict.fromkeys(p, 0.0), dict.fromkeys(p, 0.0)
    for step, scale in enumerate((1e-4, 10.0), start=1):  # one below the norm, one above
        grads = jax.tree.map(lambda x, s=scale: s * rng.normal(size=x.shape).astype("f4"), params)
        params, state = update(params, state, grads)
        g = {k: x.astype(float) for k, x in named(grads).items()}
        norm = np.sqrt(sum((x**2).sum() for x in g.values()))
        assert (norm > 0.5) == (step == 2)
        lr = rates(10, lr=1e-2)[step - 1]
        for k in p:
            clipped = g[k] * min(1, 0.5 / norm)
            m[k], v[k] = 0.8 * m[k] + 0.2 * clipped, 0.9 * v[k] + 0.1 * clipped**2
            adam = m[k] / (1 - 0.8**step) / (np.sqrt(v[k] / (1 - 0.9**step)) + 1e-6)
            p[k] = p[k] - lr * (adam + (0.2 if is_matrix(k) else 0) * p[k])
        for k, found in named(params).items():
            np.testing.assert_allclose(found, p[k], rtol=1e-4, atol=1e-6)

"""Dead neurons are drawn anew, all move with what belongs to them, and idle ones are skipped.

Skipping is the same training, unless a neuron would be active that is skipped. Its reference is a
run that never sorts, so that all its steps are at full width.
"""

import dataclasses
import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax import drawn
from tests.twell_jax.train.small import D_FF, END, L1, draw, named, settings, trainer_on
from twell_jax.models import sharding
from twell_jax.train import neurons
from twell_jax.train.neurons import (
    Skipping,
    counted,
    is_full_width,
    live_first,
    reinitialise,
    reorder,
    reorder_moments,
)
from twell_jax.train.optimizer import make_optimizer
from twell_jax.train.trainer import Trainer

LAYERS, WIDTH, EVERY = 2, 384, 3
ALIVE = np.array([100, 200])  # which take one and two chunks of 128
LATE = 40  # further neurons of the first layer that were active just before the first step
MODEL = settings().model.model_dump() | {"d_ff": WIDTH, "d_model": 16, "heads": 1}
WIDE = {
    "model": MODEL, "dead_window_tokens": 10**6,
    "optimizer": {"lr": 1e-2, "eps": 1e-2},  # so that Adam does not make signs of rounding errors
}  # fmt: skip


@pytest.mark.parametrize(("gated", "gate"), [(True, "w_gate"), (False, "w_up")])
def test_dead_gates_are_drawn_anew_and_their_moments_forgotten(gated, gate):
    run = settings()
    old_params = nnx.state(drawn.transformer(**run.model.model_dump() | {"gated": gated}))
    optimizer = make_optimizer(run.optimizer, run.steps)
    shapes = jax.eval_shape(optimizer.init, old_params)
    moments = jax.tree.map(lambda leaf: np.ones(leaf.shape, leaf.dtype), shapes)
    dead = seeds.rng().random((LAYERS, D_FF)) < 0.3
    reinitialised = jax.jit(functools.partial(reinitialise, scale=0.5, optimizer=optimizer))
    params, opt_state = reinitialised(old_params, moments, dead, key=jax.random.key(1))
    before, after = named(old_params), named(params)
    assert before.keys() == after.keys()
    for name, old in before.items():
        changed = np.any(after[name] != old, axis=-1)
        assert np.array_equal(changed, dead) if f"'{gate}'" in name else not changed.any()
    (new,) = (after[name][dead] for name in after if f"'{gate}'" in name)
    assert abs(new.std() / 0.5 - 1) < 0.15 and abs(new.mean()) < 0.1

    before, after = named(moments), named(opt_state)
    forgotten = [name for name, old in before.items() if np.any(after[name] != old)]
    assert len(forgotten) == 2 and all(f"'{gate}'" in name for name in forgotten)  # mu and nu
    for name in forgotten:
        assert not after[name][dead].any() and np.all(after[name][~dead] == 1)


@functools.cache  # compiled once for all tests that use it
def trainer_of(seed):
    return Trainer(settings(seed=seed), END, trainer_on(1).mesh)


def idle_for(steps, step=0):
    """A state after `step` steps, in which the neurons have been idle for `steps`."""
    idle = jnp.asarray(np.broadcast_to(np.int32(steps), (LAYERS, D_FF)))
    return dataclasses.replace(trainer_on(1).init(), step=jnp.int32(step), idle_steps=idle)


def gates(state):
    return np.asarray(state.params["blocks"]["mlp"]["w_gate"])


def test_a_neuron_is_dead_from_the_end_of_the_window_on():
    trainer, window = trainer_on(1), 2  # dead_window_tokens are those of two batches
    steps = np.arange(D_FF) % 5
    with jax.set_mesh(trainer.mesh):
        before = gates(trainer.init())
        state = trainer.reinitialise(idle_for(steps, step=7))
    changed = np.any(gates(state) != before, axis=-1)
    np.testing.assert_array_equal(changed, [steps >= window] * LAYERS)
    np.testing.assert_array_equal(state.idle_steps, [steps * (steps < window)] * LAYERS)
    assert state.step == 7


def test_the_draw_follows_from_the_seed_and_the_step():
    def redrawn(seed, step):
        trainer = trainer_of(seed)
        with jax.set_mesh(trainer.mesh):
            return gates(trainer.reinitialise(idle_for(9, step)))

    first = redrawn(0, 3)
    np.testing.assert_array_equal(redrawn(0, 3), first)
    for other in (redrawn(0, 4), redrawn(1, 3)):
        assert (other != first).mean() > 0.9


@pytest.mark.sampled(1)
@pytest.mark.parametrize("gated", [True, False])
def test_everything_that_belongs_to_a_neuron_moves_and_the_model_stays_the_same(gated):
    model = drawn.transformer(**MODEL | {"gated": gated, "mlp_bias": True})
    graph, params = nnx.split(model)
    optimizer = make_optimizer(settings().optimizer, 50)
    moments = jax.tree.map(
        lambda leaf: seeds.rng().random(leaf.shape).astype(leaf.dtype),
        jax.eval_shape(optimizer.init, params),
    )
    order = np.array([seeds.rng().permutation(WIDTH) for _ in range(LAYERS)], np.int32)

    @jax.jit
    def reordered(params, moments, order):
        moments = reorder_moments(moments, params, order, optimizer)
        return reorder(params, order), moments

    ours = reordered(params, moments, order)
    before, after = named((params, moments)), named(ours)
    assert before.keys() == after.keys()
    moved = [name for name, value in before.items() if np.any(after[name] != value)]
    assert len(moved) == 3 * (5 if gated else 3)  # parameters and two moments
    for name in moved:
        for layer in range(LAYERS):
            np.testing.assert_array_equal(after[name][layer], before[name][layer][order[layer]])
    tokens = draw(2)[:, :-1]
    compute = jax.jit(lambda params: nnx.merge(graph, params)(tokens)[0])
    logits, sorted_logits = map(compute, (params, ours[0]))
    assert relative_error(sorted_logits, logits) < 1e-5


def test_split_neurons_are_refused():
    mesh = jax.make_mesh((2, 2), ("fsdp", "tensor"), devices=jax.devices("cpu")[:4])
    with jax.set_mesh(mesh), pytest.raises(ValueError, match=r"^neurons are split .*'tensor'"):
        reorder({}, np.zeros((1, 1), np.int32))


@pytest.mark.slow
def test_a_step_after_ordering_finds_the_active_neurons_in_front():
    run = settings(sparse_gradients_every=2, model=MODEL)
    trainer = Trainer(run, END, sharding.make_mesh((1, 1), jax.devices("cpu")[:1]))
    silent = np.array([seeds.rng().random(WIDTH) < 0.4 for _ in range(LAYERS)])
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        gate = state.params["blocks"]["mlp"]["w_gate"]
        gate[...] = jnp.where(silent[:, :, None], 0, gate[...])  # which has no gradient either
        tokens = trainer.put_batch(draw())
        state, before = trainer.step(state, tokens, L1)
        used = before.tiles, before.nnz
        _, after = trainer.step(trainer.order_by_use(state, *used), tokens, L1)
    np.testing.assert_array_equal(np.asarray(before.tiles) > 0, ~silent)
    in_front = np.arange(WIDTH) < (~silent).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(after.tiles) > 0, in_front)


@pytest.fixture(scope="module")
def trainer():
    run = settings(mesh={"fsdp": 4}, micro_batch=2, skip_dead_every=EVERY, **WIDE)
    return Trainer(run, END, sharding.make_mesh((2, 4), jax.devices("cpu")[:8]))


@pytest.fixture(scope="module")
def batches():
    return [draw() for _ in range(2 * EVERY)]


@pytest.fixture(scope="module")
def dead():
    """[layers, d_ff], scattered: 0 for neurons that are alive, 1 for late ones, 2 for dead ones."""
    kinds = np.where(np.arange(WIDTH) < ALIVE[:, None], 0, 2)
    kinds[0, -LATE:] = 1
    return np.array([seeds.rng().permutation(layer) for layer in kinds])


def with_dead(state, dead):
    """Gates of zero, and moments that go on moving the other weights of the dead neurons."""
    state = jax.device_get(state)
    gate = state.params["blocks"]["mlp"]["w_gate"]
    gate.set_value(np.where(dead[..., None] > 0, np.float32(0), gate[...]))
    for name in ("w_up", "w_down"):
        moment = optax.tree.get(state.opt_state, "mu")["blocks"]["mlp"][name]
        moment.set_value(np.full_like(moment[...], 1e-3))
    return dataclasses.replace(state, idle_steps=np.array([0, 1, 100], np.int32)[dead])


def train(trainer, batches, dead, sort=True):
    """The state after the batches and the metrics of each, as the loop of a run would have them."""
    run, measured = trainer._config, []
    with jax.set_mesh(trainer.mesh):
        state = jax.device_put(with_dead(trainer.init(), dead), trainer._shardings)
        state = trainer.with_rounded(state)
        for step, tokens in enumerate(batches):
            state, metrics = trainer.step(state, trainer.put_batch(tokens), L1)
            measured.append(jax.device_get(metrics))
            if sort and is_full_width(run, step):
                state = trainer.sort_neurons(state)
    return state, measured


@pytest.fixture(scope="module")
def skipped(trainer, batches, dead):
    return train(trainer, batches, dead)


@pytest.fixture(scope="module")
def at_full_width(trainer, batches, dead):
    return train(trainer, batches, dead, sort=False)


@pytest.mark.slow
def test_losses_are_those_at_full_width_if_dead_neurons_stay_dead(skipped, at_full_width):
    for ours, reference in zip(skipped[1], at_full_width[1], strict=True):
        for name in ("ce", "l1", "grad_norm", "nnz", "dead"):
            np.testing.assert_allclose(
                getattr(ours, name), getattr(reference, name), rtol=1e-5, err_msg=name
            )
        assert not ours.missed.any()
    live = [metrics.live.tolist() for metrics in skipped[1]]
    assert live == [
        [WIDTH, WIDTH], [256, 256], [256, 256], [WIDTH, WIDTH], [128, 256], [128, 256],
    ]  # fmt: skip
    assert all((metrics.live == WIDTH).all() for metrics in at_full_width[1])


def test_weights_and_moments_are_those_of_gradients_of_zero(trainer, skipped, at_full_width, dead):
    order = np.argsort(dead, axis=1, kind="stable")
    with jax.set_mesh(trainer.mesh):
        before = np.asarray(trainer.init().params["blocks"]["mlp"]["w_up"])
    ours, reference = (named((s.params, s.opt_state)) for s, _ in (skipped, at_full_width))
    assert ours.keys() == reference.keys()
    for name, value in reference.items():
        if re.search("'(w_gate|w_up|w_down)'", name):
            value = np.take_along_axis(value, order[..., None], axis=1)
        assert relative_error(ours[name], value) < 1e-4, name
    idle = np.take_along_axis(np.asarray(at_full_width[0].idle_steps), order, axis=1)
    np.testing.assert_array_equal(skipped[0].idle_steps, idle)
    after = np.asarray(at_full_width[0].params["blocks"]["mlp"]["w_up"])
    assert (after != before)[dead > 0].mean() > 0.99  # by what is left of the moments, and by decay


def test_what_is_active_though_skipped_is_missed_counted_and_computed_again(trainer, batches, dead):
    state, _ = train(trainer, batches[:1], dead)
    revived = WIDTH - 5 + np.arange(5)  # among the last, which are skipped
    with jax.set_mesh(trainer.mesh):
        gate = state.params["blocks"]["mlp"]["w_gate"]
        rows = np.asarray(gate[...]).copy()
        rows[1, revived] = rows[1, :5]
        gate[...] = jax.device_put(rows, gate[...].sharding)
        measured = []
        for step, tokens in enumerate(batches[1:5], start=1):
            state, metrics = trainer.step(state, trainer.put_batch(tokens), L1)
            measured.append(jax.device_get(metrics))
            if is_full_width(trainer._config, step):
                state = trainer.sort_neurons(state)
    assert [metrics.missed.tolist() for metrics in measured] == 2 * [[0, 0]] + 2 * [[0, 5]]
    of_five = measured[2].nnz[1] - measured[1].nnz[1]
    assert 0.5 < of_five < 5  # of which about half are active for a token
    idle = np.asarray(state.idle_steps)
    assert (idle[1, : ALIVE[1] + 5] == 0).all() and (idle[1, ALIVE[1] + 5 :] > 0).all()
    assert (idle[0, ALIVE[0] + LATE :] == 105).all()


def test_what_was_active_in_the_last_steps_stays_as_many_as_lie_between_two_at_full_width(trainer):
    idle = np.arange(WIDTH, dtype=np.int32) % 5
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        idle_steps = jax.device_put(np.stack([idle] * LAYERS), state.idle_steps.sharding)
        state = trainer.sort_neurons(dataclasses.replace(state, idle_steps=idle_steps))
    expected = [*idle[idle < EVERY], *idle[idle >= EVERY]]
    np.testing.assert_array_equal(state.idle_steps, [expected] * LAYERS)
    assert state.skipping.live.tolist() == [256] * LAYERS  # 231, and 308 in one step more


def test_a_mesh_sorts_its_own_columns_in_place(trainer):
    with jax.set_mesh(trainer.mesh):
        compiled = trainer.sort_neurons.lower(trainer.abstract_state).compile()
    assert not re.search("all-gather|all-reduce|all-to-all|permute", compiled.as_text())
    memory = compiled.memory_analysis()
    assert memory.output_size_in_bytes - memory.alias_size_in_bytes < 1000
    of_a_layer = 4 * WIDTH * MODEL["d_model"] // 4  # bytes of float32 on each of four devices
    assert memory.temp_size_in_bytes < 4 * of_a_layer


@given(hnp.arrays(bool, st.tuples(st.just(3), st.sampled_from([5, 128, 300]))))
def test_active_neurons_come_first_in_their_order(active):
    order, live = map(np.asarray, jax.jit(live_first)(active))
    for layer in range(3):
        (first,), (last,) = np.nonzero(active[layer]), np.nonzero(~active[layer])
        np.testing.assert_array_equal(order[layer], [*first, *last])
        wanted = min(128 * -(-len(first) // 128), active.shape[1])
        assert live[layer] == wanted


def test_steps_with_new_gates_are_at_full_width_and_miss_none_of_them():
    run = settings(skip_dead_every=4, reinit_every=6, **WIDE)
    assert [step for step in range(14) if is_full_width(run, step)] == [0, 4, 6, 8, 12]
    traced = jax.jit(jax.vmap(functools.partial(is_full_width, run)))(jnp.arange(14))
    assert np.flatnonzero(traced).tolist() == [0, 4, 6, 8, 12]
    before = Skipping(jnp.array([2, 3]), jnp.array([7, 8]))
    active, idle = jnp.ones((2, 6), bool), jnp.array([[0, 0, 3, 0, 3, 3], [0, 0, 9, 0, 0, 5]])
    after = counted(before, active, idle, jnp.int32(6), run)
    assert after.missed.tolist() == [3, 1] and after.live.tolist() == [2, 3]
    fewer = counted(before, active.at[0, 4].set(False), idle, jnp.int32(8), run)
    assert fewer.missed.tolist() == [2, 1]
    between = counted(before, active, idle, jnp.int32(7), run)
    assert between.missed.tolist() == [7, 8]
    live = [neurons.live_in(before, jnp.int32(step), run).tolist() for step in (6, 7)]
    assert live == [[WIDTH, WIDTH], [2, 3]]


def test_nothing_is_missed_in_a_step_whose_predecessor_skipped_nothing():
    run = settings(skip_dead_every=4, reinit_every=3, dead_window_tokens=10**6)
    before = Skipping(jnp.full(2, D_FF // 2), jnp.zeros(2, jnp.int32))
    active = jnp.zeros((2, D_FF), bool).at[:, -1].set(True)
    idle = jnp.full((2, D_FF), 4)
    missed = [counted(before, active, idle, jnp.int32(step), run).missed for step in (4, 8)]
    assert [found.tolist() for found in missed] == [[0, 0], [1, 1]]  # step 3 had new gates


def test_evaluation_is_at_full_width(trainer, skipped, at_full_width, batches):
    ce, reference = (
        trainer.evaluate(state.params, batches[0]) for state, _ in (skipped, at_full_width)
    )
    np.testing.assert_allclose(ce, reference, rtol=1e-5)
    state = jax.tree.map(jnp.copy, skipped[0])
    none = jax.device_put(jnp.zeros(LAYERS, jnp.int32), state.skipping.live.sharding)
    blind = dataclasses.replace(
        state, step=state.step + 1, skipping=dataclasses.replace(state.skipping, live=none)
    )
    with jax.set_mesh(trainer.mesh):
        _, metrics = trainer.step(blind, trainer.put_batch(batches[0]), L1)
    assert not metrics.nnz.any() and abs(metrics.ce - ce) > 1e-3  # with no neuron


@pytest.mark.gpu
@pytest.mark.parametrize("gradients", [None, "sparse"])
def test_kernels_skip_the_same_neurons(gradients, dead):
    changes = {"context": 64, "d_model": 128, "heads": 2, "dtype": "bfloat16"}
    tokens = [seeds.rng().integers(0, 61, (16, 65)).astype(np.int32) for _ in range(EVERY + 1)]
    found = []
    for implementation in ("xla", "mosaic"):
        model = MODEL | changes | {"ffn_implementation": implementation}
        if implementation == "mosaic":
            model |= {"ffn_gradients": gradients}
        run = settings(**WIDE | {"model": model}, batch_tokens=16 * 64, skip_dead_every=EVERY)
        trainer = Trainer(run, END, sharding.make_mesh((1, 1), jax.devices()[:1]))
        found.append(train(trainer, tokens, dead)[1])
    for xla, kernels in zip(*found, strict=True):
        for name in ("ce", "l1", "nnz", "grad_norm"):
            np.testing.assert_allclose(getattr(kernels, name), getattr(xla, name), rtol=1e-2)
        np.testing.assert_array_equal(kernels.live, xla.live)
        assert not kernels.missed.any()
    assert (found[0][1].live < WIDTH).all()

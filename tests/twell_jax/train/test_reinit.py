"""Re-initialisation of dead neurons: their gates and moments, and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from tests.twell_jax.train.test_trainer import D_FF, END, settings, trainer_on
from twell_jax.train.optimizer import make_optimizer
from twell_jax.train.reinit import reinitialise
from twell_jax.train.trainer import Trainer

LAYERS = settings().model.layers


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


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

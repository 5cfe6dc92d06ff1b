"""Re-initialisation of dead neurons: their gates and moments, and nothing else."""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tests import seeds
from twell_jax import config
from twell_jax.models import sharding
from twell_jax.train.optimizer import make_optimizer
from twell_jax.train.reinit import reinitialise
from twell_jax.train.trainer import Trainer, init_state

LAYERS, D_FF, D_MODEL = 2, 64, 32


def settings(**changes):
    tree = {
        "run_dir": "unused",
        "steps": 100,
        "batch_tokens": 128,
        "micro_batch": 4,
        "dead_window_tokens": 256,
        "model": {
            "vocab_size": 257,
            "context": 32,
            "d_model": D_MODEL,
            "layers": LAYERS,
            "heads": 4,
            "d_ff": D_FF,
            "dtype": "float32",
            "gated": changes.pop("gated", True),
        },
    }
    return config.from_dict(tree | changes)


def named(tree):
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {jax.tree_util.keystr(path): np.asarray(leaf) for path, leaf in leaves}


@pytest.mark.parametrize(("gated", "gate"), [(True, "w_gate"), (False, "w_up")])
def test_dead_gates_are_drawn_anew_and_their_moments_forgotten(gated, gate):
    run = settings(gated=gated)
    state = init_state(run)
    moments = jax.tree.map(lambda x: x + 1, state.opt_state)
    dead = seeds.rng().random((LAYERS, D_FF)) < 0.3
    params, opt_state = reinitialise(
        state.params,
        moments,
        jnp.asarray(dead),
        key=jax.random.key(1),
        scale=0.5,
        optimizer=make_optimizer(run.optimizer, run.steps),
    )
    before, after = named(state.params), named(params)
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
    mesh = sharding.make_mesh((1, 1), jax.devices()[:1])
    return Trainer(settings(seed=seed), 256, mesh)


def idle_for(trainer, steps, step=0):
    """A state after `step` steps, in which the neurons have been idle for `steps`."""
    idle = jnp.broadcast_to(jnp.asarray(steps, jnp.int32), (LAYERS, D_FF))
    return dataclasses.replace(trainer.init(), step=jnp.int32(step), idle_steps=idle)


def gates(state):
    return np.asarray(state.params["blocks"]["mlp"]["w_gate"])


def test_a_neuron_is_dead_from_the_end_of_the_window_on():
    trainer, window = trainer_of(0), 2  # of 256 tokens: two batches
    steps = np.arange(D_FF) % 5
    with jax.set_mesh(trainer.mesh):
        before = gates(trainer.init())
        state = trainer.reinitialise(idle_for(trainer, steps, step=7))
    changed = np.any(gates(state) != before, axis=-1)
    np.testing.assert_array_equal(changed, [steps >= window] * LAYERS)
    np.testing.assert_array_equal(state.idle_steps, [steps * (steps < window)] * LAYERS)
    assert state.step == 7


def test_the_draw_follows_from_the_seed_and_the_step():
    def drawn(seed, step):
        trainer = trainer_of(seed)
        with jax.set_mesh(trainer.mesh):
            return gates(trainer.reinitialise(idle_for(trainer, 9, step)))

    first = drawn(0, 3)
    np.testing.assert_array_equal(drawn(0, 3), first)
    for other in (drawn(0, 4), drawn(1, 3)):
        assert (other != first).mean() > 0.9


def test_a_dead_neuron_can_fire_again():
    trainer, tokens = trainer_of(0), seeds.rng().integers(0, 256, (4, 33), dtype=np.int32)

    def idle_after_a_step(state):
        state, _ = trainer.step(state, trainer.put_batch(tokens), 0.0)
        return state, state.idle_steps[1, 7]

    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        gate = state.params["blocks"]["mlp"]["w_gate"]
        gate[...] = gate[...].at[1, 7].set(0)  # relu(0) never fires, and has no gradient
        for step in (1, 2, 3):
            state, idle = idle_after_a_step(state)
            assert idle == step
        _, idle = idle_after_a_step(trainer.reinitialise(state))
        assert idle == 0

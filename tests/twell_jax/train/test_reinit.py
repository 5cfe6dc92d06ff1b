"""Re-initialisation of dead neurons: their gates and moments, and nothing else."""

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


def test_a_dead_neuron_can_fire_again_and_the_draw_follows_from_seed_and_step():
    run = settings()
    mesh = sharding.make_mesh((1, 1), jax.devices()[:1])
    with jax.set_mesh(mesh):
        trainer = Trainer(run, 256, mesh)
        tokens = seeds.rng().integers(0, 256, (4, 33), dtype=np.int32)

        def silenced():
            state = trainer.init()
            gate = state.params["blocks"]["mlp"]["w_gate"]
            gate[...] = gate[...].at[1, 7].set(0)  # relu(0) never fires, and has no gradient
            for _ in range(3):
                state, metrics = trainer.step(state, trainer.put_batch(tokens), 0.0)
            assert metrics.dead[1] >= 1 / D_FF and state.idle_steps[1, 7] == 3
            return trainer.reinitialise(state)

        state, again = silenced(), silenced()
        assert state.idle_steps[1, 7] == 0 and state.step == 3
        for a, b in zip(jax.tree.leaves(state), jax.tree.leaves(again), strict=True):
            np.testing.assert_array_equal(a, b)
        state, _ = trainer.step(state, trainer.put_batch(tokens), 0.0)
        assert state.idle_steps[1, 7] == 0  # it fired

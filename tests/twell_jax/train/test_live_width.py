"""Training a model with numbers of live neurons: they stay, and neither gradients nor moments pass
them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from tests.twell_jax.train.small import D_FF, draw, on_one_device, settings
from twell_jax.train.checkpoint import Checkpoints

LIVE = np.array([5, 31], np.int32)


def with_live(state):
    mlp = state.params["blocks"]["mlp"]
    assert mlp["live"][...].tolist() == [D_FF, D_FF]
    mlp["live"][...] = jnp.asarray(LIVE)
    return state


@pytest.mark.slow
def test_training_leaves_it_alone_and_checkpoints_keep_it(tmp_path):
    trainer, batch = on_one_device(settings(model={"live_width": True})), draw()
    with jax.set_mesh(trainer.mesh):
        state = with_live(trainer.init())
        for _ in range(2):
            state, metrics = trainer.step(state, trainer.put_batch(batch), 1e-2)
        state = trainer.reinitialise(state)
        ce = trainer.evaluate(state.params, batch)
    assert (np.asarray(metrics.nnz) < LIVE).all() and np.isfinite(ce)
    mlp = state.params["blocks"]["mlp"]
    np.testing.assert_array_equal(mlp["live"][...], LIVE)
    moments = optax.tree.get(state.opt_state, "nu")["blocks"]["mlp"]
    assert "live" not in moments
    for name in ("w_gate", "w_up", "w_down"):
        for layer, live in enumerate(LIVE):
            rows = np.asarray(moments[name][...])[layer].any(axis=1)
            assert not rows[live:].any() and rows[:live].any()

    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        checkpoints.save(2, state, {})
    with Checkpoints(tmp_path / "checkpoints", keep=1) as checkpoints:
        restored, _ = checkpoints.restore(trainer.abstract_state)
        params = checkpoints.restore_params(trainer.abstract_state.params)
    for found in (restored.params, params):
        jax.tree.map(np.testing.assert_array_equal, found, state.params)

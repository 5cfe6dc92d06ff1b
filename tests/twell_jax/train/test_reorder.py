"""All that belongs to a neuron moves with it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax import drawn
from tests.twell_jax.train.test_reinit import named
from tests.twell_jax.train.test_skip_dead import D_FF, LAYERS, MODEL
from tests.twell_jax.train.test_trainer import END, L1, draw, settings
from twell_jax.models import sharding
from twell_jax.train.optimizer import make_optimizer
from twell_jax.train.reorder import reorder, reorder_moments
from twell_jax.train.trainer import Trainer


@pytest.mark.parametrize("gated", [True, False])
def test_everything_that_belongs_to_a_neuron_moves_and_the_model_stays_the_same(gated):
    model = drawn.transformer(**MODEL | {"gated": gated, "mlp_bias": True})
    graph, params = nnx.split(model)
    optimizer = make_optimizer(settings().optimizer, 50)
    moments = jax.tree.map(
        lambda leaf: seeds.rng().random(leaf.shape).astype(leaf.dtype),
        jax.eval_shape(optimizer.init, params),
    )
    order = np.array([seeds.rng().permutation(D_FF) for _ in range(LAYERS)], np.int32)

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


def test_a_step_after_ordering_finds_the_neurons_that_fire_in_front():
    run = settings(sparse_gradients_every=2, model=MODEL)
    trainer = Trainer(run, END, sharding.make_mesh((1, 1), jax.devices("cpu")[:1]))
    silent = np.array([seeds.rng().random(D_FF) < 0.4 for _ in range(LAYERS)])
    with jax.set_mesh(trainer.mesh):
        state = trainer.init()
        gate = state.params["blocks"]["mlp"]["w_gate"]
        gate[...] = jnp.where(silent[:, :, None], 0, gate[...])  # which has no gradient either
        tokens = trainer.put_batch(draw())
        state, before = trainer.step(state, tokens, L1)
        used = before.tiles, before.nnz
        _, after = trainer.step(trainer.order_by_use(state, *used), tokens, L1)
    np.testing.assert_array_equal(np.asarray(before.tiles) > 0, ~silent)
    in_front = np.arange(D_FF) < (~silent).sum(axis=1, keepdims=True)
    np.testing.assert_array_equal(np.asarray(after.tiles) > 0, in_front)

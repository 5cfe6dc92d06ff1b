"""All that belongs to a neuron moves with it."""

import jax
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax import drawn
from tests.twell_jax.train.test_reinit import named
from tests.twell_jax.train.test_skip_dead import D_FF, LAYERS, MODEL
from tests.twell_jax.train.test_trainer import draw, settings
from twell_jax.train.optimizer import make_optimizer
from twell_jax.train.reorder import reorder, reorder_moments


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

"""Which layers' gradients are sparse: the rule, what is saved of it, and the model's part."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.models.transformer import Transformer, graphdef
from twell_jax.train.gradient_plan import GradientPlan


def test_a_layer_is_tried_when_few_neurons_fire_and_stays_while_it_fits():
    plan = GradientPlan.dense(layers=2, d_ff=1600)
    plan = plan.revised(nnz=[700, 90], overflow=[0, 0])
    assert plan.sparse == (False, True)
    plan = plan.revised(nnz=[90, 300], overflow=[0, 0])
    assert plan.sparse == (True, True)


def test_after_an_overflow_it_takes_markedly_fewer():
    plan = GradientPlan.dense(layers=1, d_ff=1600).revised(nnz=[90], overflow=[0])
    plan = plan.revised(nnz=[80], overflow=[0.5])
    assert plan.sparse == (False,)
    for nnz, is_sparse in ((79, False), (57, False), (55, True), (200, True)):
        plan = plan.revised(nnz=[nnz], overflow=[0])
        assert plan.sparse == (is_sparse,)
    plan = plan.revised(nnz=[1000], overflow=[1])
    assert plan.sparse == (False,) and plan.limits == pytest.approx((56,))


def test_the_model_is_told_of_sparse_layers_alone():
    plan = GradientPlan.dense(layers=3, d_ff=1600).revised(nnz=[1, 700, 2], overflow=[0, 0, 0])
    assert plan.ffn_gradients == ("sparse", None, "sparse")


def test_a_plan_survives_json_and_keeps_the_names_that_checkpoints_have():
    plan = GradientPlan.dense(layers=3, d_ff=512).revised(nnz=[1, 99, 2], overflow=[0, 0, 0])
    saved = json.loads(json.dumps(dataclasses.asdict(plan)))
    assert saved.keys() == {"sparse", "limits"}
    assert GradientPlan.from_saved(saved) == plan


@pytest.mark.parametrize("remat", ["none", "block"])
def test_layers_of_a_model_may_differ_in_their_gradients(remat, monkeypatch):
    config = ModelConfig(
        vocab_size=257, context=16, d_model=32, layers=4, heads=2, d_ff=64, remat=remat
    )
    model = nnx.merge(graphdef(config), nnx.state(Transformer(config, rngs=nnx.Rngs(0))))
    tokens = jnp.asarray(np.random.default_rng().integers(0, 257, (2, 16)))
    called = []

    def sparse_ffn(*operands, gradients, **options):
        called.append(gradients)
        return original(*operands, **options)

    from twell_jax.ffn import module as mlp

    original = mlp.sparse_ffn
    monkeypatch.setattr(mlp, "sparse_ffn", sparse_ffn)
    expected, same = model(tokens), called.copy()
    called.clear()
    mixed = model(tokens, ffn_gradients=("sparse", None, None, "sparse"))
    assert set(same) == {None} and called[0] == called[-1] == "sparse" and None in called
    for ours, theirs in zip(*map(jax.tree.leaves, (mixed, expected)), strict=True):
        np.testing.assert_allclose(ours, theirs, rtol=1e-5, atol=1e-6)

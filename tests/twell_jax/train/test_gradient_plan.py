"""Which layers' gradients are sparse: the rule, what is saved of it, and the model's part."""

import dataclasses
import json

import pytest

from twell_jax.train.gradient_plan import GradientPlan


def tried(plan, nnz):
    """`plan` after a trial is announced and begun."""
    overflow = [0] * len(nnz)
    return plan.revised(nnz, overflow).revised(nnz, overflow)


def test_a_layer_is_tried_when_few_neurons_fire_and_stays_while_it_fits():
    plan = GradientPlan.dense(layers=2, d_ff=1600)
    plan = plan.revised(nnz=[700, 90], overflow=[0, 0])
    assert plan.sparse == (False, False) and plan.announced == (False, True)
    plan = plan.revised(nnz=[90, 300], overflow=[0, 0])
    assert plan.sparse == (False, True) and plan.announced == (True, False)
    plan = plan.revised(nnz=[90, 300], overflow=[0, 0])
    assert plan.sparse == (True, True) and plan.announced == (False, False)


def test_after_an_overflow_it_takes_markedly_fewer():
    plan = tried(GradientPlan.dense(layers=1, d_ff=1600), nnz=[90])
    plan = plan.revised(nnz=[80], overflow=[0.5])
    assert plan.sparse == (False,)
    for nnz, is_sparse in ((79, False), (57, False), (55, False), (99, True), (200, True)):
        plan = plan.revised(nnz=[nnz], overflow=[0])
        assert plan.sparse == (is_sparse,)
    plan = plan.revised(nnz=[1000], overflow=[1])
    assert plan.sparse == (False,) and plan.limits == pytest.approx((56,))


def test_the_model_is_told_of_sparse_layers_alone_and_of_the_next_plan_before():
    plan = tried(GradientPlan.dense(layers=3, d_ff=1600), nnz=[1, 700, 700])
    plan = plan.revised(nnz=[1, 700, 2], overflow=[0, 0, 0])
    assert plan.ffn_gradients == ("sparse", None, None)
    assert plan.next_ffn_gradients == ("sparse", None, "sparse")
    assert plan.revised([1, 700, 2], [0, 0, 0]).ffn_gradients == plan.next_ffn_gradients


def test_a_plan_survives_json_and_keeps_the_names_that_checkpoints_have():
    plan = tried(GradientPlan.dense(layers=3, d_ff=512), nnz=[1, 99, 99])
    plan = plan.revised(nnz=[1, 99, 2], overflow=[0, 0, 0])
    saved = json.loads(json.dumps(dataclasses.asdict(plan)))
    assert saved.keys() == {"sparse", "limits", "announced"}
    assert GradientPlan.from_saved(saved) == plan
    del saved["announced"]  # as checkpoints of 0.1 and 0.2 do
    assert GradientPlan.from_saved(saved) == dataclasses.replace(plan, announced=(False,) * 3)

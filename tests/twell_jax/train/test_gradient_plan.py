"""Each layer's gradients: the rule, what is saved of it, and the model's part."""

import functools
import json

import jax
import jax.numpy as jnp
import pytest

from tests.devices import H100, abstract_gpu
from twell_jax import config, sparse_ffn
from twell_jax.ffn import dispatch, measured
from twell_jax.ffn.algorithms import CAPACITY, Case
from twell_jax.train.gradient_plan import GradientPlan, planned_every

USUAL = 1.0, 0.9  # union and listed of a layer that has just begun to train


def revised(plan, *layers, overflow=None):
    """The next plan, if each layer measured this (union, listed)."""
    union, listed = zip(*layers, strict=True)
    return plan.revised(union, listed, overflow or [0] * len(layers))


def planned(*layers):
    """The plan in which layers with this (union, listed) come to rest."""
    return revised(GradientPlan.dense(len(layers)), *layers).followed


@pytest.mark.parametrize(
    ("union", "listed", "fits"),
    [
        (0, 0, True),  # no neuron is active
        (0.2, 0.2, True),  # the recorded pattern
        (0.48, 0.5, True),  # skewed, nnz 60
        (0.2, 0.68, True),  # the lists decide as well
        (0.2, 0.69, False),
        (0.55, 0.74, False),  # it would fit, but barely
        (0.69, 0.2, False),
        (*USUAL, False),
        (1, 1, False),
    ],
)
def test_a_layer_becomes_sparse_if_the_capacity_holds_it_with_a_margin(union, listed, fits):
    assert planned((union, listed)).capacities == (fits * CAPACITY,)


def test_a_layer_that_outgrows_the_capacity_becomes_dense():
    plan = planned((0.67, 0.5))
    assert revised(plan, (0.72, 0.5)) == plan and plan.capacities == (CAPACITY,)
    plan = revised(plan, (0.74, 0.5))
    assert plan.capacities == (CAPACITY,) and plan.announced == plan.followed.capacities == (0,)


def test_a_dense_layer_is_the_program_of_xla(lower):
    """So patterns for which kernels take longer lose nothing, nor do they before the first plan."""
    dense = GradientPlan.dense(1).ffn_gradients[0]
    x, w = (jax.ShapeDtypeStruct((n, 256), jnp.bfloat16) for n in (4096, 512))

    def step(options, *operands):
        def loss(operands):
            y, stats = sparse_ffn(*operands, **options)
            return jnp.sum(y.astype(jnp.float32) ** 2) + stats.l1

        return jax.value_and_grad(loss)(operands)

    planned, by_xla = (
        lower(functools.partial(step, options), x, w, w, w)
        for options in ({"gradients": dense}, {"implementation": "xla"})
    )
    assert planned == by_xla and "mosaic" not in planned
    asked = functools.partial(step, {"gradients": CAPACITY})
    assert "mosaic" in lower(asked, x, w, w, w)


def test_a_change_is_announced_until_its_program_is_ready():
    plan = revised(GradientPlan.dense(3), (0.2, 0.1), USUAL, USUAL)
    assert plan.capacities == (0, 0, 0) and plan.announced == (CAPACITY, 0, 0)
    plan = revised(plan, (0.2, 0.1), (0.3, 0.1), USUAL)  # before it is ready
    assert plan.capacities == (0, 0, 0) and plan.announced == (CAPACITY, CAPACITY, 0)
    plan = plan.followed
    assert plan.capacities == plan.announced == (CAPACITY, CAPACITY, 0)
    assert revised(plan, (0.2, 0.1), (0.3, 0.1), USUAL) == plan


def test_what_is_announced_stays_with_the_margin_of_a_sparse_layer():
    plan = revised(GradientPlan.dense(2), (0.67, 0.1), USUAL)
    plan = revised(plan, (0.70, 0.1), USUAL)  # with which no dense layer becomes sparse
    assert plan.announced == (CAPACITY, 0)


def test_what_no_longer_fits_before_its_program_is_ready_is_taken_back():
    plan = revised(GradientPlan.dense(2), (0.2, 0.1), USUAL)
    plan = revised(plan, (0.8, 0.1), USUAL)
    assert plan.capacities == plan.announced == (0, 0)


def test_a_plan_rests_while_its_capacity_holds():
    plan = planned(*3 * [(0.3, 0.1)])
    assert plan.capacities == 3 * (CAPACITY,) == plan.all_sparse.capacities
    for union in (0.36, 0.01, 0.72):  # 0.72 would not become sparse now
        assert revised(plan, (union, 0.1), (0.3, 0.1), (0.3, 0.1)) == plan


def test_an_overflow_is_corrected_and_widens_the_margin_for_good():
    plan = planned((0.6, 0.1), (0.2, 0.1))
    told = revised(plan, (0.8, 0.1), (0.2, 0.1), overflow=[0.5, 0])
    assert told.capacities == (CAPACITY, CAPACITY) and told.announced == (0, CAPACITY)
    assert told.margins == pytest.approx((1.32, 1.1))
    # Until its program is ready it goes on to overflow, which says nothing new.
    assert revised(told, (0.8, 0.1), (0.2, 0.1), overflow=[0.5, 0]) == told
    corrected = told.followed
    for need, capacities in ((0.57, (0, CAPACITY)), (0.56, (CAPACITY, CAPACITY))):
        assert revised(corrected, (need, 0.1), (0.2, 0.1)).announced == capacities
    # Other devices needed more than the mean over devices says, but the margin still holds it.
    plan = revised(plan, (0.5, 0.1), (0.2, 0.1), overflow=[0.5, 0])
    assert plan.announced == (CAPACITY, CAPACITY)
    # A layer that goes on to overflow becomes dense.
    for _ in range(9):
        plan = revised(plan, (0.2, 0.1), (0.2, 0.1), overflow=[0.5, 0]).followed
    assert plan.capacities == (0, CAPACITY)


def test_a_saved_plan_keeps_its_capacities_until_it_changes():
    plan = GradientPlan(capacities=(1 / 4, 0.0), announced=(1 / 4, 0.0), margins=(1.1, 1.1))
    assert plan.ffn_gradients == (1 / 4, None)
    plan = revised(plan, (0.2, 0.1), USUAL)
    assert plan.capacities == (1 / 4, 0) and plan.announced == (CAPACITY, 0)


def test_the_model_is_told_of_sparse_layers_alone():
    plan = revised(planned((0.2, 0.1), USUAL, USUAL), (0.2, 0.1), USUAL, (0.05, 0.1))
    assert plan.ffn_gradients == (CAPACITY, None, None) and plan.sparse == (True, False, False)
    assert plan.followed.ffn_gradients == (CAPACITY, None, CAPACITY)


def test_a_plan_survives_json_and_keeps_the_names_that_checkpoints_have():
    plan = revised(planned((0.2, 0.1), USUAL), (0.2, 0.1), (0.05, 0.1), overflow=[0.1, 0])
    saved = json.loads(json.dumps(plan.saved()))
    assert saved.keys() == {"rooms", "announced", "margins"}
    assert GradientPlan.from_saved(saved) == plan


@pytest.fixture
def on_an_h100():
    with jax.sharding.use_abstract_mesh(H100):
        yield


@pytest.mark.parametrize("name", ["0p5b", "1b", "1p5b", "2b", "sparsify"])
def test_shipped_configurations_plan_sparse_gradients_where_kernels_serve(on_an_h100, name):
    kept = {"sparsify": ["model.d_model=2048", "model.d_ff=5632", "model.heads=32"]}
    more = ["model.vocab_size=257", "model.layers=2", "init_from=null"] if name in kept else []
    assert 10 <= planned_every(config.load(name, [*kept.get(name, []), *more])) <= 100


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        ([], 10),  # of a million tokens
        (["batch_tokens=131072"], 76),
        (["batch_tokens=16384"], 100),
        (["sparse_gradients_every=7"], 7),
        (["sparse_gradients_every=0"], 0),
        (["model.activation=silu", "l1_coefficient=0", "union_target=null", "lasso_share=0"], 0),
        (["model.dtype=float32"], 0),
        (["model.ffn_implementation=xla"], 0),
        (["model.ffn_gradients=dense"], 0),
        (["l1_coefficient=1", "lasso_share=1", "data.mask_documents=true"], 0),
    ],
)
def test_auto_plans_where_the_configuration_leaves_gradients_to_it(on_an_h100, changes, steps):
    assert planned_every(config.load("0p5b", changes)) == steps


def test_auto_plans_nothing_on_a_card_that_nobody_measured(monkeypatch, tmp_path):
    monkeypatch.setenv("TWELL_JAX_CACHE", str(tmp_path))
    settings = config.load("0p5b")
    with jax.sharding.use_abstract_mesh(abstract_gpu("NVIDIA RTX PRO 6000")):
        assert planned_every(settings) == 0
        block = dispatch.measurable(*case_of(settings))
        card, forward = "NVIDIA RTX PRO 6000", {settings.batch_tokens: {"unions": 1.0}}
        for sparse, steps in ((2.0, 10), (4.0, 0)):
            measured.keep(card, block, forward, {16384: {"dense": 3.0, "sparse": sparse}})
            assert planned_every(settings) == steps
        measured.keep(card, block, forward, {})
        assert planned_every(settings) == 0


def case_of(settings):
    """What decides about a block of a run, with the kernels of the current device."""
    model = settings.model
    kernels, _ = dispatch.back_end(jax.ShapeDtypeStruct((model.d_ff, model.d_model), model.dtype))
    tokens = settings.micro_batch * model.context
    return Case(tokens, model.d_model, model.d_ff, True, back_end=kernels.name), model.dtype


def test_auto_plans_nothing_without_kernels():
    changes = ["model.ffn_implementation=mosaic", "lasso_share=0"]
    assert planned_every(config.load("0p5b", changes)) == 0

"""Each layer's gradients: the rule, what is saved of it, and the model's part."""

import dataclasses
import json

import pytest

from twell_jax.train.gradient_plan import GradientPlan

USUAL = 1.0, 0.9  # union and listed of a layer that has just begun to train


def revised(plan, *layers, overflow=None):
    """The next plan, if each layer measured this (union, listed)."""
    union, listed = zip(*layers, strict=True)
    return plan.revised(union, listed, overflow or [0] * len(layers))


def planned(*layers):
    """The plan in which layers with this (union, listed) come to rest."""
    return revised(revised(GradientPlan.dense(len(layers)), *layers), *layers)


@pytest.mark.parametrize(
    ("union", "listed", "room"),
    [
        (0, 0, 1 / 8),  # no neuron fires
        (0.1, 0.05, 1 / 8),
        (0.12, 0.05, 1 / 4),  # 1/8 would hold it, but barely
        (0.2, 0.2, 1 / 4),  # the recorded pattern
        (0.36, 0.29, 1 / 2),  # skewed, nnz 29
        (0.2, 0.45, 1 / 2),  # the lists decide as well
        (0.48, 0.5, 3 / 4),  # skewed, nnz 60
        (0.55, 0.74, 0),  # no room is large enough
        (0.65, 0.75, 0),
        (*USUAL, 0),
        (1, 1, 0),
    ],
)
def test_a_layer_gets_the_least_room_that_holds_it_with_a_margin(union, listed, room):
    assert planned((union, listed)).rooms == (room,)


def test_a_layer_that_outgrows_all_rooms_becomes_dense():
    plan = planned((0.67, 0.5))
    assert revised(plan, (0.72, 0.5)) == plan and plan.rooms == (3 / 4,)
    plan = revised(plan, (0.74, 0.5))
    assert plan.rooms == (3 / 4,) and plan.announced == (0,)
    assert revised(plan, (0.74, 0.5)).rooms == revised(plan, (0.74, 0.5)).announced == (0,)


def test_a_change_is_announced_one_plan_ahead():
    plan = GradientPlan.dense(2)
    plan = revised(plan, (0.2, 0.1), USUAL)
    assert plan.rooms == (0, 0) and plan.announced == (1 / 4, 0)
    plan = revised(plan, (0.2, 0.1), (0.3, 0.1))
    assert plan.rooms == (1 / 4, 0) and plan.announced == (1 / 4, 3 / 8)
    plan = revised(plan, (0.2, 0.1), (0.3, 0.1))
    assert plan.rooms == plan.announced == (1 / 4, 3 / 8)


def test_what_no_longer_fits_when_its_time_comes_is_announced_anew():
    plan = revised(GradientPlan.dense(1), (0.2, 0.1))
    plan = revised(plan, (0.3, 0.1))
    assert plan.rooms == (0,) and plan.announced == (3 / 8,)


def test_a_plan_rests_while_its_rooms_hold():
    plan = planned(*3 * [(0.3, 0.1)])
    assert plan.rooms == 3 * (3 / 8,)
    for union in (0.36, 0.25, 0.35, 0.23):  # 0.36 would get 1/2 now, 0.23 would get 1/4
        again = revised(plan, (union, 0.1), (0.3, 0.1), (0.3, 0.1))
        assert again == plan
    grown = revised(plan, (0.37, 0.1), (0.3, 0.1), (0.3, 0.1))
    assert grown.rooms == plan.rooms and grown.announced == (1 / 2, 3 / 8, 3 / 8)


def test_rooms_shrink_when_that_saves_a_third_of_them_all():
    plan = planned(*3 * [(0.3, 0.1)])
    assert revised(plan, (0.1, 0.1), (0.3, 0.1), (0.3, 0.1)) == plan
    assert revised(plan, (0.1, 0.1), (0.2, 0.1), (0.3, 0.1)).announced == (1 / 8, 1 / 4, 3 / 8)
    none_fires = planned(*3 * [(0, 0)])
    assert revised(none_fires, *3 * [(0, 0)]) == none_fires


def test_an_overflow_is_corrected_at_once_and_widens_the_margin_for_good():
    plan = planned((0.2, 0.1), (0.2, 0.1))
    corrected = revised(plan, (0.26, 0.1), (0.2, 0.1), overflow=[0.5, 0])
    assert corrected.rooms == corrected.announced == (3 / 8, 1 / 4)
    assert corrected.margins == pytest.approx((1.32, 1.1))
    # Other devices needed more than the mean over devices says.
    corrected = revised(plan, (0.24, 0.1), (0.2, 0.1), overflow=[0.5, 0])
    assert corrected.rooms == (3 / 8, 1 / 4)
    # A layer that overflows in spite of every room becomes dense.
    for _ in range(9):
        corrected = revised(corrected, (0.24, 0.1), (0.2, 0.1), overflow=[0.5, 0])
    assert corrected.rooms == (0, 1 / 4)


def test_neighbours_share_a_room_so_that_there_are_few_loops():
    unions = [0.1, 0.1, 0.1, 0.1, 0.2, 0.1, 0.4, 0.4, 0.3, 0.4, 0.1, 0.6, 0.6]
    rooms = planned(*((union, 0.1) for union in unions)).rooms
    assert rooms == (*4 * [1 / 8], *2 * [1 / 4], *5 * [1 / 2], *2 * [3 / 4])
    # Dense layers stay dense, and separate the others.
    layers = 3 * [(0.2, 0.1), USUAL]
    assert planned(*layers).rooms == 3 * (1 / 4, 0)


def test_the_model_is_told_of_sparse_layers_alone_and_of_the_next_plan_before():
    plan = revised(planned((0.2, 0.1), USUAL, USUAL), (0.2, 0.1), USUAL, (0.05, 0.1))
    assert plan.ffn_gradients == (1 / 4, None, None) and plan.sparse == (True, False, False)
    assert plan.next_ffn_gradients == (1 / 4, None, 1 / 8)


def test_a_plan_survives_json_and_keeps_the_names_that_checkpoints_have():
    plan = revised(planned((0.2, 0.1), USUAL), (0.2, 0.1), (0.05, 0.1), overflow=[0.1, 0])
    saved = json.loads(json.dumps(dataclasses.asdict(plan)))
    assert saved.keys() == {"rooms", "announced", "margins"}
    assert GradientPlan.from_saved(saved) == plan

"""A run starts on its own text alone, with gradients that can be computed; what it prepares."""

import io
from dataclasses import replace
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from twell_jax import config
from twell_jax.config import ConfigError
from twell_jax.ffn import CannotServe
from twell_jax.ffn.algorithms import CAPACITY
from twell_jax.models import sharding
from twell_jax.train.checkpoint_errors import CannotSave
from twell_jax.train.gradient_plan import GradientPlan, largest_measured
from twell_jax.train.loop import Run, Standing, _compile_ahead, _next_plan, start
from twell_jax.train.run_directory import AnotherRun
from twell_jax.train.served import first_plan, warn_of_products, with_gradients_served
from twell_jax.train.trainer import Trainer


class Batches:
    """The position of an iterator over the data."""

    position = 0

    def get_state(self):
        return {"next_index": self.position}

    def set_state(self, state):
        self.position = state["next_index"]


class OneCheckpoint:
    """What was saved last, in memory."""

    saved = None

    def save(self, step, state, position):
        self.saved = state, position

    def restore(self, abstract_state):
        return self.saved


class Prepared(list):
    """What a run has compiled ahead, in its order: names of calls, and programs."""

    def __init__(self):
        self.ready, self.busy = set(), False

    prepare = list.append

    def is_ready(self, key):
        return key in self.ready

    def is_idle(self):
        return not self.busy

    def prepare_call(self, name, compile_it):
        self.append(name)


NO_LOG = SimpleNamespace(sync=lambda: None)


def run_on(fingerprint, checkpoints, require_in_place=lambda: None):
    return Run(
        config=config.load("tiny"),
        paths=SimpleNamespace(directory="runs/tiny"),
        data=SimpleNamespace(fingerprint=fingerprint),
        batches=Batches(),
        trainer=SimpleNamespace(
            abstract_state=None,
            plans_every=0,
            steps=SimpleNamespace(settle=lambda _: None),
            with_rounded=lambda state: state,
        ),
        checkpoints=checkpoints,
        write_sample=None,
        console=Console(quiet=True),
        require_in_place=require_in_place,
        given=config.load("tiny"),
    )


def test_a_run_continues_on_its_own_text_alone():
    checkpoints = OneCheckpoint()
    run = run_on("its text", checkpoints)
    run.batches.position = 7
    state = SimpleNamespace(step=jnp.int32(7))
    Standing(7, state, None, None).save(run, NO_LOG)

    again = run_on("its text", checkpoints)
    assert start(again).step == 7
    assert again.batches.position == 7

    other = run_on("another text", checkpoints)
    with pytest.raises(AnotherRun, match=r"^data: the training text is not that of the run in "):
        start(other)
    assert other.batches.position == 0


def test_nothing_is_saved_where_the_directory_was_moved():
    def moved():
        raise CannotSave("moved")

    checkpoints = OneCheckpoint()
    with pytest.raises(CannotSave, match="moved"):
        Standing(7, None, None, None).save(run_on("its text", checkpoints, moved), NO_LOG)
    assert checkpoints.saved is None


def test_metrics_are_on_the_disk_before_a_checkpoint_is_begun():
    done = []
    log = SimpleNamespace(sync=lambda: done.append("metrics"))
    checkpoints = SimpleNamespace(save=lambda *_: done.append("checkpoint"))
    Standing(7, None, None, None).save(run_on("its text", checkpoints), log)
    assert done == ["metrics", "checkpoint"]


def planning_run(ahead, every):
    run = run_on("its text", None)
    run.trainer.steps, run.trainer.plans_every, run.data.held_out = ahead, every, None
    run.trainer.mesh, run.trainer.compile_evaluation, run.trainer.compile_ordering = None, id, id
    return run


def test_what_is_called_between_steps_is_compiled_first_and_then_the_plan_to_come():
    dense = GradientPlan.dense(2)
    for plan, programs in ((dense, [(CAPACITY, CAPACITY)]), (dense.all_sparse, [])):
        _compile_ahead(planning_run(ahead := Prepared(), 10), Standing(0, None, plan, None))
        assert ahead == ["save", "evaluation", "order", *programs]


def test_no_step_waits_for_the_program_of_a_plan():
    ahead, every = Prepared(), 10
    run, need = planning_run(ahead, every), jnp.array([0.2, 0.9])
    plan, measured = GradientPlan.dense(2), (need, need, jnp.zeros(2))

    def revised(plan, step=3 * every):
        return _next_plan(run, Standing(step - 1, None, plan, measured), plan)

    ahead.busy = True  # with the plan of all layers
    plan = revised(plan)
    assert plan.sparse == (False, False) and plan.announced == (CAPACITY, 0) and ahead == []
    ahead.busy = False
    assert revised(plan, run.config.steps - every) == plan and ahead == []  # it is the last plan
    assert revised(plan) == plan and ahead == [(CAPACITY, None)]
    ahead.ready.add((CAPACITY, None))
    assert revised(plan).sparse == (True, False)


def test_a_layer_that_goes_on_to_overflow_until_its_plan_is_compiled_is_told_of_once():
    console = Console(file=io.StringIO(), width=200)
    run = replace(planning_run(Prepared(), 10), console=console)
    plan, need = GradientPlan.dense(2).all_sparse, jnp.array([0.9, 0.2])
    measured = need, need, jnp.array([0.5, 0])
    for step in (29, 39, 49):
        plan = _next_plan(run, Standing(step, None, plan, measured), plan)
    assert plan.sparse == (True, True) and plan.announced == (0, CAPACITY)
    (line,) = console.file.getvalue().splitlines()
    assert line.startswith("up to step 29 layers 0 exceeded the capacity")


def test_a_plan_follows_from_the_newest_half_of_the_steps_and_from_every_overflow():
    falling, every = [0.9, 0.8, 0.7, 0.6, 0.5, 0.55], 6
    overflows = [0, 0.25, 0, 0, 0, 0]
    measured = None
    for step, (need, overflow) in enumerate(zip(falling, overflows, strict=True), start=every):
        of_step = tuple(jnp.array([x]) for x in (need, need / 2, overflow))
        measured = largest_measured(measured, of_step, step, every) if measured else of_step
    assert [float(a[0]) for a in measured] == pytest.approx([0.6, 0.3, 0.25])


ONE = sharding.make_mesh((1, 1), jax.devices("cpu")[:1])
SAYS = "it needs an Ampere, Ada, Hopper or RTX Blackwell GPU, got cpu; here all gradients are dense"


def test_a_plan_of_sparse_gradients_that_cannot_be_computed_is_one_warning(caplog):
    settings = config.load("tiny", ["sparse_gradients_every=10"])
    assert first_plan(settings, Trainer(settings, 0, ONE)) is None
    assert caplog.messages == [f"sparse_gradients_every: {SAYS}"]


def test_sparse_gradients_that_cannot_be_computed_are_one_warning(caplog):
    settings = config.load("tiny", ["model.ffn_gradients=sparse"])
    served, trainer = with_gradients_served(settings, 0, ONE)
    assert caplog.messages == [f"model.ffn_gradients: {SAYS}"]
    assert served.model == settings.model.model_copy(update={"ffn_gradients": None})
    assert trainer.abstract_batch.shape == (1, 16, 257)


@pytest.mark.parametrize("asked", ["sparse_gradients_every=10", "model.ffn_gradients=sparse"])
def test_kernels_that_are_asked_for_are_never_left_out(asked):
    settings = config.load("tiny", [asked, "model.ffn_implementation=mosaic"])
    with pytest.raises(CannotServe, match="Blackwell GPU"):
        first_plan(*with_gradients_served(settings, 0, ONE))


def test_products_that_a_device_has_not_are_one_warning(caplog):
    settings = config.load("tiny", ["model.matmul_dtype=float8"])
    for capability in ("8.9", "9.0", "10.3", "12.0"):
        device = SimpleNamespace(device_kind="a GPU", compute_capability=capability)
        warn_of_products(settings, device)
    warn_of_products(config.load("tiny", []), jax.devices("cpu")[0])
    assert not caplog.messages
    warn_of_products(settings, jax.devices("cpu")[0])
    warn_of_products(settings, SimpleNamespace(device_kind="NVIDIA A100", compute_capability="8.0"))
    says = (
        "does not multiply 8-bit floats; operands are rounded to them, but nothing becomes faster"
    )
    named = (f"model.matmul_dtype=float8: {device} {says}" for device in ("cpu", "NVIDIA A100"))
    assert caplog.messages == [*named]


def test_a_run_that_goes_on_with_more_steps_says_so(capsys):
    checkpoints = OneCheckpoint()
    state = SimpleNamespace(step=jnp.int32(300))
    Standing(300, state, None, None).save(run_on("a", checkpoints), NO_LOG)
    before, now = config.load("tiny"), config.load("tiny", ["steps=600"])
    run = replace(run_on("a", checkpoints), config=now, before=before, console=Console(width=200))
    assert start(run).step == 300
    told = capsys.readouterr().out.splitlines()
    assert told[0] == "continuing runs/tiny at step 300"
    assert told[1].startswith("steps: 300 -> 600, so by its schedule the learning rate at step 300")


def test_fewer_steps_than_a_run_has_taken_are_refused():
    checkpoints = OneCheckpoint()
    state = SimpleNamespace(step=jnp.int32(301))
    Standing(301, state, None, None).save(run_on("a", checkpoints), NO_LOG)
    with pytest.raises(ConfigError, match=r"^steps: the run in runs/tiny has taken 301, got 300; "):
        start(run_on("a", checkpoints))

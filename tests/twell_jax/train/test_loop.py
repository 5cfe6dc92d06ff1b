"""How a run starts: on its own text alone, and only if its gradients can be computed."""

from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest
from rich.console import Console

from twell_jax import config
from twell_jax.ffn import CannotServe
from twell_jax.models import sharding
from twell_jax.train.checkpoint import CannotSave
from twell_jax.train.loop import Run, Standing, first_plan, start
from twell_jax.train.run_directory import AnotherRun
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


NO_LOG = SimpleNamespace(sync=lambda: None)


def run_on(fingerprint, checkpoints, require_in_place=lambda: None):
    return Run(
        config=config.load("tiny"),
        paths=SimpleNamespace(directory="runs/tiny"),
        data=SimpleNamespace(fingerprint=fingerprint),
        batches=Batches(),
        trainer=SimpleNamespace(abstract_state=None),
        checkpoints=checkpoints,
        write_sample=None,
        console=Console(quiet=True),
        require_in_place=require_in_place,
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


def test_sparse_gradients_that_cannot_be_computed_are_refused_before_training():
    settings = config.load("tiny", ["sparse_gradients_every=10"])
    trainer = Trainer(settings, 0, sharding.make_mesh((1, 1), jax.devices("cpu")[:1]))
    with pytest.raises(CannotServe, match="Hopper GPU"):
        first_plan(settings, trainer)

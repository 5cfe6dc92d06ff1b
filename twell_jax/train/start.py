"""Starts a run or restores it from its last checkpoint; holds its position between two steps."""

import dataclasses
from dataclasses import dataclass

import grain
import jax
import numpy as np
from rich.console import Console

from twell_jax.config import Config
from twell_jax.data import Data
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.gradient_plan import GradientPlan
from twell_jax.train.init_from import initial_params
from twell_jax.train.run_directory import AnotherRun, RunPaths
from twell_jax.train.state import TrainState
from twell_jax.train.trainer import Trainer

type Measured = tuple[jax.Array | np.ndarray, ...]


@dataclass(frozen=True)
class Run:
    """The objects that a run uses from its first step to its last.

    Attributes:
      config: its settings.
      paths: its directory.
      data: its data.
      batches: the iterator over its training batches, which advances with every step.
      trainer: its compiled functions.
      checkpoints: its checkpoints, open.
      console: where it prints; silent in all processes but the first.
    """

    config: Config
    paths: RunPaths
    data: Data
    batches: grain.DatasetIterator
    trainer: Trainer
    checkpoints: Checkpoints
    console: Console


@dataclass(frozen=True)
class Standing:
    """The position of a run between two steps.

    Attributes:
      step: number of steps taken.
      state: the training state; the next step consumes it.
      plan: which layers have sparse gradients; None if the config decides for all of them.
      measured: `union`, `listed` and `overflow` of `StepMetrics`, float [layers] each, the largest
        of all steps since the plan was made, for the next one; None before the first step, or
        without a plan.
    """

    step: int
    state: TrainState
    plan: GradientPlan | None
    measured: Measured | None

    def save(self, run: Run) -> None:
        """Starts writing a checkpoint from which `start` continues exactly here."""
        # In checkpoints the plan is called "choice", and its inputs "choose_from".
        position = {"corpus": run.data.fingerprint, "iterator": run.batches.get_state()}
        if self.plan:
            position["choice"] = dataclasses.asdict(self.plan)
            position["choose_from"] = [of_layers.tolist() for of_layers in self.measured or ()]
        run.checkpoints.save(self.step, self.state, position)


def start(run: Run) -> Standing:
    """Restores the last checkpoint and moves `run.batches` to it; without one, begins the run.

    Raises:
      AnotherRun: the training text differs from that of the checkpoint.
      CannotServe: the config asks for sparse gradients, and they cannot be computed here.
      CheckpointError: there are checkpoints, but none is whole.
      ConfigError: what `init_from` names does not fit.
    """
    restored = run.checkpoints.restore(run.trainer.abstract_state)
    finished = restored is not None and restored[0].step >= run.config.steps
    plan = None if finished else first_plan(run.config, run.trainer)
    if restored is None:
        return Standing(0, _first_state(run), plan, None)

    state, position = restored
    if position["corpus"] != run.data.fingerprint:
        raise AnotherRun(
            f"data: the training text is not that of the run in {run.paths.directory}; "
            "restore the old files, or choose another run_dir"
        )
    run.batches.set_state(position["iterator"])
    measured, choice = None, position.get("choice")
    # Checkpoints up to version 0.2 hold plans without rooms; such a run plans anew, from dense.
    if plan and choice and "rooms" in choice:
        plan = GradientPlan.from_saved(choice)
        measured = tuple(map(np.array, position["choose_from"])) or None
    done = "finished" if finished else "continuing"
    run.console.out(f"{done} {run.paths.directory} at step {state.step}", highlight=False)
    return Standing(int(state.step), state, plan, measured)


def first_plan(config: Config, trainer: Trainer) -> GradientPlan | None:
    """The plan that a run begins with; None if it does not plan its gradients.

    Raises:
      CannotServe: sparse gradients cannot be computed here.
    """
    if not config.sparse_gradients_every:
        return None
    plan = GradientPlan.dense(config.model.layers)
    step = trainer.step_with(plan.all_sparse.ffn_gradients)
    jax.eval_shape(step, trainer.abstract_state, trainer.abstract_batch, 0.0)
    return plan


def _first_state(run: Run) -> TrainState:
    config, state = run.config, run.trainer.init()
    if not config.init_from:
        return state
    abstract = run.trainer.abstract_state.params
    params = initial_params(config, run.data.tokenizer, abstract, run.trainer.mesh)
    return dataclasses.replace(state, params=params)

"""A training run from its first step, or its last checkpoint, to its end."""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import grain
import jax
import numpy as np
from rich.console import Console

from twell_jax import data
from twell_jax.analysis.estimate import Estimate
from twell_jax.config import Config, ConfigError
from twell_jax.data import Data
from twell_jax.models import sharding
from twell_jax.train import distributed, gain, metrics, profile, sample, source
from twell_jax.train.checkpoint import Checkpoints, prepare_save
from twell_jax.train.durable import write_atomically
from twell_jax.train.gradient_plan import GradientPlan, Measured, largest_measured
from twell_jax.train.init_from import initial_params, source_model, tokenizer_of
from twell_jax.train.neurons import is_full_width
from twell_jax.train.optimizer import l1_coefficient, moved_learning_rate
from twell_jax.train.progress import Painter, Progress, patient_console, show_result
from twell_jax.train.report import Score
from twell_jax.train.run_directory import (
    AnotherRun,
    RunPaths,
    keep_settings,
    open_checkpoints,
    open_run,
    started_with,
)
from twell_jax.train.sample import Writer
from twell_jax.train.served import first_plan, warn_of_products, with_gradients_served
from twell_jax.train.state import TrainState
from twell_jax.train.trainer import ModelGradients, Trainer

log = logging.getLogger(__name__)

# What `CompileAhead` prepares beside steps.
_EVALUATION, _SAMPLE, _ORDER, _SAVE = "evaluation", "sample", "order", "save"


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
      write_sample: has a model of these parameters write a text; None if none is wanted, or the
        tokenizer is not known.
      console: where it prints; silent in all processes but the first.
      require_in_place: raises `CannotSave` if its directory is no longer where it was.
      given: its settings as the user gave them, which its directory keeps.
      before: its settings when it was last started; None if it begins.
    """

    config: Config
    paths: RunPaths
    data: Data
    batches: grain.DatasetIterator
    trainer: Trainer
    checkpoints: Checkpoints
    write_sample: Writer | None
    console: Console
    require_in_place: Callable[[], None]
    given: Config
    before: Config | None = None


@dataclass(frozen=True)
class Standing:
    """The position of a run between two steps.

    Attributes:
      step: number of steps taken.
      state: the training state; the next step consumes it.
      plan: which layers have sparse gradients; None if the config decides for all of them.
      measured: `union`, `listed` and `overflow` of `StepMetrics`, float [layers] each, the largest
        of all steps since the plan was made, for the next one; once half of them are done, the
        first two are those of the second half. None before the first step, or without a plan.
    """

    step: int
    state: TrainState
    plan: GradientPlan | None
    measured: Measured | None

    @property
    def ffn_gradients(self) -> ModelGradients | None:
        """Those of the next step; None leaves them to the config."""
        return self.plan.ffn_gradients if self.plan else None

    def save(self, run: Run, log: metrics.Log) -> None:
        """Starts writing a checkpoint from which `start` continues exactly here."""
        run.require_in_place()
        run.trainer.steps.settle(_SAVE)
        log.sync()  # a checkpoint is never ahead of the metrics
        # In checkpoints the plan is called "choice", and its inputs "choose_from".
        position = {"corpus": run.data.fingerprint, "iterator": run.batches.get_state()}
        if self.plan:
            position["choice"] = self.plan.saved()
            position["choose_from"] = [of_layers.tolist() for of_layers in self.measured or ()]
        run.checkpoints.save(self.step, self.state, position)


def train(config: Config, require_in_place: Callable[[], None], score: Score | None = None) -> None:
    """Trains until the last step, or until the process is asked to stop, and shows the result.

    All processes of a run call it. It sets JAX's current mesh.

    Args:
      config: the run.
      require_in_place: of `lock_run` in the process that holds the lock; others do not look.
      score: scores models on tasks, for the report of a run of one process that has `init_from`.

    Raises:
      AnotherRun: `run_dir` holds a run with other settings or text.
      CannotSave: a checkpoint cannot be written, or the directory was moved; the checkpoints before
        are whole.
      CannotServe: the config asks for an implementation that this machine lacks.
      CheckpointError: there are checkpoints, but none is whole.
      ConfigError: the data, the directory or the number of devices does not fit the config.
      NonFiniteLoss: the loss or its gradient became inf or NaN.
    """
    index, count = jax.process_index(), jax.process_count()
    if score and count > 1:
        raise ConfigError(
            "--tasks: serves a run of one process; leave it out, and score the finished run by "
            "twell_jax.evaluate"
        )
    console = patient_console(quiet=index > 0)
    if count > 1:  # printed now, as JAX may end this process if another is lost
        console.out(
            f"{count} processes: if one is lost, the others end within "
            f"{config.mesh.heartbeat_seconds} s; the same command on all hosts continues"
        )
    before, given = started_with(config.run_dir), config
    paths = open_run(config)
    with distributed.stop_request() as stop_requested:
        corpus = data.load(config, tokenizer_of(config), process_index=index, process_count=count)
        mesh = sharding.make_mesh(config.mesh.shape(jax.device_count()))
        jax.set_mesh(mesh)
        warn_of_products(config, mesh.devices.flat[0])
        config, trainer = with_gradients_served(config, corpus.tokenizer.eot_id, mesh)
        batches = iter(corpus.train)
        scored = _scored_source(config, score, console)  # while the memory is free
        require_in_place()  # the data may have taken hours
        with open_checkpoints(paths, config) as checkpoints:
            run = Run(
                config=config,
                paths=paths,
                data=corpus,
                batches=batches,
                trainer=trainer,
                checkpoints=checkpoints,
                write_sample=sample.writer(config, corpus, trainer.abstract_state.params, mesh),
                console=console,
                require_in_place=require_in_place,
                given=given,
                before=before,
            )
            step, gained = _take_steps(run, stop_requested)
            batches.close()

    if step < config.steps:
        console.out(f"stopped at step {step}; the same command continues")
    elif index == 0:
        require_in_place()
        show_result(config, paths, corpus.unigram_cross_entropy, console, gained, score, scored)
    if trainer.steps.stop():
        console.out("waiting for a program that is still being compiled")


def _scored_source(config: Config, score: Score | None, console: Console) -> Mapping[str, float]:
    """The scores of the model that a run begins with, which are shown."""
    if score is None:
        return {}
    assert config.init_from is not None
    scored = score(config.init_from)
    for name, value in scored.items():
        console.out(f"{name} of {config.init_from}: {value:.3f}")
    return scored


def start(run: Run) -> Standing:
    """Restores the last checkpoint and moves `run.batches` to it; without one, begins the run.

    Raises:
      AnotherRun: the training text differs from that of the checkpoint.
      CannotServe: see `first_plan`.
      CheckpointError: there are checkpoints, but none is whole.
      ConfigError: what `init_from` names does not fit, or the run has taken more steps than it
        may have.
    """
    restored = run.checkpoints.restore(run.trainer.abstract_state)
    if restored is not None and restored[0].step > run.config.steps:
        raise ConfigError(
            f"steps: the run in {run.paths.directory} has taken {restored[0].step}, got "
            f"{run.config.steps}; give so many or more, or choose another run_dir"
        )
    finished = restored is not None and restored[0].step == run.config.steps
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
    # Checkpoints up to version 0.2 hold plans without "rooms"; such a run plans anew, from dense.
    if plan and choice and "rooms" in choice:
        plan = GradientPlan.from_saved(choice)
        measured = tuple(map(np.array, position["choose_from"])) or None
    done = "finished" if finished else "continuing"
    run.console.out(f"{done} {run.paths.directory} at step {state.step}")
    if moved := run.before and moved_learning_rate(run.before, run.config, int(state.step)):
        run.console.out(moved)
    return Standing(int(state.step), run.trainer.with_rounded(state), plan, measured)


def _first_state(run: Run) -> TrainState:
    config, state = run.config, run.trainer.init()
    if not config.init_from:
        return state
    abstract = run.trainer.abstract_state.params
    params = initial_params(config, run.data.tokenizer, abstract, run.trainer.mesh)
    return run.trainer.with_rounded(replace(state, params=params, rounded=None))


def _take_steps(run: Run, stop_requested: Callable[[int], bool]) -> tuple[int, Estimate | None]:
    """Starts or continues the run; returns the step at which it ended, and what was gained."""
    config, now = run.config, start(run)
    wanted = [name for name in metrics.SINKS if getattr(config, name)]
    run.require_in_place()
    if jax.process_index() == 0:
        keep_settings(run.paths, run.given)
        write_atomically(run.paths.tokenizer, run.data.tokenizer.to_json())
        if now.step == 0:
            source.keep(config, run.data.tokenizer, run.paths.source)
    with (
        metrics.Log(run.paths.metrics, now.step, wanted) as log,
        Progress(run.console, now.step, config.steps, config.model.d_ff) as progress,
        profile.traced(run.paths.profile, config.profile_steps, run.console) as trace,
        Painter(config, run.paths, run.console) as painter,
    ):
        recorder = metrics.Recorder(config, log, progress.show, run.checkpoints)
        if config.init_from and now.step == 0:
            _evaluate_source(run, now, recorder)
        trainer, stopping = run.trainer, stop_requested(now.step)
        if now.step < config.steps and not stopping:
            _compile_ahead(run, now)
        while now.step < config.steps and not stopping:
            trace.before_step(now.step, now.state)
            if not trainer.steps.is_ready(now.ffn_gradients):
                progress.show_compiling()
            now = _take_step(run, now, recorder)
            trace.after_step(now.step, now.state)
            last = now.step == config.steps
            if now.step % config.eval_every == 0 or last:
                recorder.flush()
                _evaluate(run, now, recorder, progress)
                if not last:  # else show_result draws
                    run.require_in_place()
                    painter.redraw()
            stopping = stop_requested(now.step)  # once a step, so that a stop also saves
            if now.step % config.checkpoint_every == 0 or last or stopping:
                recorder.flush()
                now.save(run, log)
        recorder.flush()
    if now.step < config.steps:
        return now.step, None
    return now.step, gain.estimated(config, run.data, now.state.params, run.trainer.mesh)


def _evaluate(run: Run, now: Standing, recorder: metrics.Recorder, progress: Progress) -> None:
    """Measures the held-out text and has a sample written; records and shows both."""
    params, corpus = now.state.params, run.data
    run.trainer.steps.settle(_EVALUATION)
    held_out_ce = run.trainer.evaluate(params, corpus.held_out)
    bits_per_byte = corpus.bits_per_byte(held_out_ce)
    run.trainer.steps.settle(_SAMPLE)
    written = run.write_sample(params) if run.write_sample else None
    recorder.add_evaluation(
        now.step, held_out_ce, corpus.unigram_cross_entropy, bits_per_byte, written
    )
    progress.show_evaluation(held_out_ce, bits_per_byte, written)


def _evaluate_source(run: Run, now: Standing, recorder: metrics.Recorder) -> None:
    """Measures how the model that a run begins with reads the held-out text, as it was trained."""
    model = source_model(run.config)
    as_trained = run.config.model_copy(update={"model": model})
    trainer = Trainer(as_trained, run.data.tokenizer.eot_id, run.trainer.mesh)
    params, corpus = now.state.params, run.data
    ce = trainer.evaluate(params, corpus.held_out)
    bits_per_byte = corpus.bits_per_byte(ce)
    shapes = run.trainer.abstract_state.params
    write = sample.writer(as_trained, corpus, shapes, run.trainer.mesh)
    recorder.add_source(model.activation, ce, bits_per_byte, write(params) if write else None)
    shown = "" if bits_per_byte is None else f"  {bits_per_byte:.3f} bits/byte"
    run.console.out(f"held-out CE of {run.config.init_from}: {ce:.3f}{shown}")


def _take_step(run: Run, now: Standing, recorder: metrics.Recorder) -> Standing:
    config, trainer, state, plan = run.config, run.trainer, now.state, now.plan
    # Before a step, not after, so that no saved or evaluated model has untrained gates.
    if config.reinit_every and now.step and now.step % config.reinit_every == 0:
        state = trainer.reinitialise(state)
    batch = trainer.put_batch(next(run.batches)["tokens"])
    step = trainer.steps.get(now.ffn_gradients)
    state, measured = step(state, batch, l1_coefficient(config, now.step))
    recorder.add(now.step + 1, replace(measured, tiles=None), plan)
    largest: Measured | None = None
    if plan:
        largest = measured.union, measured.listed, measured.overflow
        if now.measured and (now.step + 1) % trainer.plans_every == 0:
            plan = _next_plan(run, now, plan)
            # Before other sorting, as the step counted the tiles of neurons where they were.
            trainer.steps.settle(_ORDER)
            state = trainer.order_by_use(state, measured.tiles, measured.nnz)
        elif now.measured:
            largest = largest_measured(now.measured, largest, now.step + 1, trainer.plans_every)
    if config.skip_dead_every and is_full_width(config, now.step):
        state = trainer.sort_neurons(state)
    return Standing(now.step + 1, state, plan, largest)


def _compile_ahead(run: Run, now: Standing) -> None:
    """Has compiled what is called between steps, and then the plan with all layers sparse.

    Call this before the first step, which is compiled at the same time, so that no later one waits.
    """
    trainer, ahead = run.trainer, run.trainer.steps
    ahead.prepare_call(_SAVE, partial(prepare_save, trainer.abstract_state, trainer.mesh))
    ahead.prepare_call(_EVALUATION, partial(trainer.compile_evaluation, run.data.held_out))
    if run.write_sample:
        ahead.prepare_call(_SAMPLE, run.write_sample.compile)
    if now.plan and _plans_again(run, now.step):
        ahead.prepare_call(_ORDER, partial(trainer.compile_ordering, now.ffn_gradients))
        all_sparse = now.plan.all_sparse.ffn_gradients
        if now.ffn_gradients != all_sparse:  # else the first step compiles it
            ahead.prepare(all_sparse)


def _next_plan(run: Run, now: Standing, plan: GradientPlan) -> GradientPlan:
    """The plan that follows from what was measured up to `now`, once its program is compiled.

    Until then it is the one before. One program is compiled at a time, so that what is wanted when
    it is done need not wait for what was.
    """
    assert now.measured is not None
    # The steps before have ended, so the device need not wait for this.
    union, listed, overflow = (of_layers.tolist() for of_layers in now.measured)
    _tell_overflow(run, now.step, plan.unexpected(overflow))
    plan, ahead = plan.revised(union, listed, overflow), run.trainer.steps
    wanted = plan.followed.ffn_gradients
    is_ready, is_idle = distributed.all_agree(ahead.is_ready(wanted), ahead.is_idle())
    if is_ready:
        return plan.followed
    if is_idle and _plans_again(run, now.step + 1):
        ahead.prepare(wanted)
    return plan


def _plans_again(run: Run, step: int) -> bool:
    """Whether a run with plans makes another one after this step."""
    return step + run.trainer.plans_every < run.config.steps


def _tell_overflow(run: Run, step: int, overflow: list[float]) -> None:
    if layers := [str(layer) for layer, share in enumerate(overflow) if share]:
        run.console.out(
            f"up to step {step} layers {', '.join(layers)} exceeded the capacity of their sparse "
            "gradients, which were computed densely; from now on they need a wider margin"
        )

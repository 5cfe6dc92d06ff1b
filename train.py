"""Trains a sparse language model: python train.py configs/tiny.yaml [key=value ...]

Everything is kept in the configuration's `run_dir`. The same command continues an interrupted run
from its last checkpoint, with exactly the result of an uninterrupted one. On several hosts it is
started on each; they need a `run_dir` that all can write to.
"""

import argparse
import contextlib
import dataclasses
import logging
import traceback

import jax
import numpy as np
from rich.console import Console

from twell_jax import config as config_lib
from twell_jax import data
from twell_jax.config import Config, ConfigError
from twell_jax.data import tokenizers
from twell_jax.ffn.api import CannotServe
from twell_jax.models import sharding
from twell_jax.train import distributed, metrics
from twell_jax.train import progress as display
from twell_jax.train.checkpoint import CheckpointError, Checkpoints
from twell_jax.train.gradient_plan import Choice
from twell_jax.train.optimizer import l1_coefficient
from twell_jax.train.plots import plot_run
from twell_jax.train.run_directory import AnotherRun, RunPaths, initial_params, lock_run, open_run
from twell_jax.train.trainer import Trainer, make_trainer

CANNOT_CONTINUE = 3  # exit status: another run is in run_dir, or one that cannot be read


def main() -> None:
    args = parse_arguments()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("twell_jax").setLevel(logging.INFO)
    try:
        config = config_lib.load(args.config, args.overrides)
        if args.print_config:
            print(config_lib.to_yaml(config), end="")
        elif args.dry_run is not None:
            estimate_memory(config, args.dry_run)
        else:
            distributed.initialize(config.mesh.heartbeat_seconds)
            first = jax.process_index() == 0
            with lock_run(config.run_dir) if first else contextlib.nullcontext():
                train(config)
    except (AnotherRun, CheckpointError) as error:
        distributed.fail(f"error: {error}", CANNOT_CONTINUE)
    except (ConfigError, CannotServe, metrics.NonFiniteLoss, OSError) as error:
        distributed.fail(f"error: {error}")
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        distributed.fail(
            "error: stopped by the exception above; if it is of a collective, another process was "
            "lost. The same command on all hosts continues from the last checkpoint"
        )


def train(config: Config) -> None:
    first = jax.process_index() == 0
    console = Console(quiet=not first)
    stop_requested = distributed.stop_request()

    if jax.process_count() > 1:  # before, as JAX itself may end a process that lost another
        console.out(
            f"{jax.process_count()} processes: if one is lost, the others end within "
            f"{config.mesh.heartbeat_seconds} s; the same command on all hosts continues",
            highlight=False,
        )
    paths = open_run(config)
    corpus = data.load(config, process_index=jax.process_index(), process_count=jax.process_count())
    mesh = sharding.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    trainer = make_trainer(config, corpus.tokenizer.eot_id, mesh)
    batches = iter(corpus.train)

    with Checkpoints(paths.checkpoints, config.checkpoint_keep) as checkpoints:
        restored = checkpoints.restore(trainer.abstract_state)
        finished = restored is not None and restored[0].step >= config.steps
        choice = None if finished else first_choice(config, trainer)
        before = np.full(config.model.layers, np.inf), np.zeros(config.model.layers)
        if restored is None:
            state = trainer.init()
            if config.init_from:
                params = trainer.abstract_state.params
                params = initial_params(config, corpus.tokenizer, params)
                state = dataclasses.replace(state, params=params)
        else:
            state, position = restored
            if position["corpus"] != corpus.fingerprint:
                raise AnotherRun(
                    f"data: the training text is not that of the run in {paths.directory}; "
                    "restore the old files, or choose another run_dir"
                )
            batches.set_state(position["iterator"])
            if choice and position.get("choice"):
                choice = Choice.restore(position["choice"])
                before = [np.array(of_layers) for of_layers in position.get("choose_from", before)]
            done = "finished" if finished else "continuing"
            console.out(f"{done} {paths.directory} at step {state.step}", highlight=False)
        step = int(state.step)
        if first:
            tokenizers.save(corpus.tokenizer, paths.tokenizer)

        with (
            metrics.Log(paths.metrics, step, config.tensorboard) as log,
            display.Progress(console, step, config.steps, config.model.d_ff) as progress,
        ):
            recorder = metrics.Recorder(config, log, progress.show, checkpoints)
            stopping = stop_requested(step)
            while step < config.steps and not stopping:
                # Before a step, not after: what is saved or evaluated has no untrained gates.
                if config.reinit_every and step and step % config.reinit_every == 0:
                    state = trainer.reinitialise(state)
                batch = trainer.put_batch(next(batches)["tokens"])
                take_step = trainer.step_with(choice.sparse) if choice else trainer.step
                state, measured = take_step(state, batch, l1_coefficient(config, step))
                step += 1
                recorder.add(step, measured, choice)
                if choice and step % config.sparse_gradients_every == 0:
                    # From the step before, which has ended: the device does not wait.
                    choice = choice.after(*(of_layers.tolist() for of_layers in before))
                before = measured.nnz, measured.overflow
                if step % config.eval_every == 0 or step == config.steps:
                    recorder.flush()
                    held_out_ce = trainer.evaluate(state.params, corpus.held_out)
                    recorder.add_evaluation(step, held_out_ce)
                    progress.print(f"step {step}  held-out CE {held_out_ce:.3f}")
                stopping = stop_requested(step)  # asked once a step: what ends the loop also saves
                if step % config.checkpoint_every == 0 or step == config.steps or stopping:
                    recorder.flush()
                    position = {"corpus": corpus.fingerprint, "iterator": batches.get_state()}
                    if choice:
                        position["choice"] = dataclasses.asdict(choice)
                        position["choose_from"] = [of_layers.tolist() for of_layers in before]
                    checkpoints.save(step, state, position)
            recorder.flush()
        batches.close()

    if step < config.steps:
        console.out(f"stopped at step {step}; the same command continues", highlight=False)
    elif first:
        show_result(config, paths, corpus.unigram_cross_entropy, console)


def first_choice(config: Config, trainer: Trainer) -> Choice | None:
    """Of a run that chooses between dense and sparse gradients.

    Raises:
      CannotServe: if sparse ones cannot be computed here.
    """
    if not config.sparse_gradients_every:
        return None
    every_layer = trainer.step_with((True,) * config.model.layers)
    jax.eval_shape(every_layer, trainer.abstract_state, trainer.abstract_batch, 0.0)
    return Choice.dense(config.model.layers, config.model.d_ff)


def show_result(config: Config, paths: RunPaths, unigram_ce: float, console: Console) -> None:
    records = metrics.read(paths.metrics)
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    if not (steps and evaluations):
        raise ConfigError(f"{paths.metrics}: the records of this run are gone; nothing to show")
    console.print(display.layer_table(steps[-1], config.model.d_ff))
    console.out(display.verdict(evaluations[-1]["held_out_ce"], unigram_ce), highlight=False)
    for path in plot_run(records, config.model.d_ff, unigram_ce, paths.directory):
        console.out(f"plot: {path}", highlight=False)


def estimate_memory(config: Config, devices: int) -> None:
    """Lowers and compiles one step for so many virtual devices and prints what it would hold."""
    if devices < 1:
        raise ConfigError(f"--dry-run: needs at least one device, got {devices}")
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = sharding.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    trainer = make_trainer(config, document_end=0, mesh=mesh)
    compiled = trainer.step.lower(trainer.abstract_state, trainer.abstract_batch, 0.0).compile()
    print(display.memory(compiled.memory_analysis(), trainer.abstract_state.params, mesh.size))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog=f"configuration keys:\n{config_lib.describe()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("config", help="YAML file, such as configs/tiny.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="e.g. model.d_model=256")
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and exit"
    )
    parser.add_argument(
        "--dry-run",
        type=int,
        metavar="DEVICES",
        help="compile a step for so many devices on the CPU and print its memory; nothing is run",
    )
    return parser.parse_intermixed_args()  # overrides may follow the options


if __name__ == "__main__":
    main()

"""Trains a sparse language model.

    python train.py configs/tiny.yaml [key=value ...]       in a clone
    python -m twell_jax.train tiny [key=value ...]          wherever the package is installed

CONFIG is a YAML file, the name of a shipped configuration, or the directory of a run, which is then
continued. Everything is kept in the configuration's `run_dir`. The same command continues an
interrupted run from its last checkpoint, with exactly the result of an uninterrupted one. Ctrl-C
and SIGTERM save and stop, with status 0; a second Ctrl-C, or one before the first step, stops at
once, with status 130. On several hosts the command is started on each; they need a `run_dir` that
all can write to.
"""

import argparse
import contextlib
import logging
import os
import sys
import traceback
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import jax

from twell_jax import config as config_lib
from twell_jax.config import ConfigError
from twell_jax.ffn import CannotServe
from twell_jax.train import compilation_cache, distributed, interrupt, memory, utf8
from twell_jax.train.checkpoint_errors import CannotSave, CheckpointError
from twell_jax.train.init_from import filled
from twell_jax.train.report import Score
from twell_jax.train.run_directory import AnotherRun, RunPaths, in_todays_terms, lock_run

type SourceOf = Callable[[argparse.Namespace], tuple[str | Path, list[str]]]

# In seconds. Steps wait so long for Python, at several places, while a thread traces a program: at
# the 5 ms that Python begins with, a step of 50 ms took 87.
_SWITCH_INTERVAL = 0.0002

CANNOT_CONTINUE = 3  # exit status: another run is in run_dir, or one that cannot be read


def main(prog: str | None = None) -> None:
    """Runs the command; `prog` is its name in the usage line (default: that of the script)."""
    utf8.ensure()
    with interrupt.at_once():
        run(parse_arguments(prog))


def run(
    args: argparse.Namespace, source_of: SourceOf | None = None, score: Score | None = None
) -> None:
    """Does what the arguments of the command ask for; ends the process with a line if it cannot.

    Args:
      args: of `parse_arguments`, or what `source_of` takes beside `print_config` and `dry_run`.
      source_of: gives the file or name that the configuration is read from, and its overrides; None
        takes those of the arguments.
      score: scores the model that a run begins with on tasks, and then the run, for its report.
    """
    # They take 0.4 s to import, for Grain and Orbax; wrong arguments and --help need neither.
    from twell_jax.train.loop import train
    from twell_jax.train.metrics import NonFiniteLoss

    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", force=True)
    logging.getLogger("twell_jax").setLevel(logging.INFO)
    try:
        training = not args.print_config and args.dry_run is None
        source, overrides = (source_of or _source)(args)
        config = config_lib.load(source, overrides, partial(_completed, training=training))
        if args.print_config:
            print(config_lib.to_yaml(config), end="")
        elif args.dry_run is not None:
            memory.print_dry_run(config, args.dry_run)
        else:
            distributed.initialize(config.mesh.heartbeat_seconds)
            compilation_cache.enable()
            memory.require_for_training(config, jax.device_count(), memory.of_device())
            sys.setswitchinterval(_SWITCH_INTERVAL)
            first = jax.process_index() == 0
            lock = lock_run(config.run_dir) if first else contextlib.nullcontext(lambda: None)
            with lock as require_in_place:
                train(config, require_in_place, score)
    except (AnotherRun, CheckpointError) as error:
        distributed.fail(f"error: {error}", CANNOT_CONTINUE)
    except (ConfigError, CannotSave, CannotServe, NonFiniteLoss, OSError) as error:
        distributed.fail(f"error: {error}")
    except Exception:
        if not jax.distributed.is_initialized():
            raise
        traceback.print_exc()
        distributed.fail(
            "error: stopped by the exception above; if it is of a collective, another process was "
            "lost. The same command on all hosts continues from the last checkpoint"
        )


def _source(args: argparse.Namespace) -> tuple[str | Path, list[str]]:
    """The file or name that the configuration is read from, and its overrides.

    Raises:
      ConfigError: a directory is named that holds no run.
    """
    directory = Path(os.path.expanduser(args.config))
    if not directory.is_dir():
        return args.config, args.overrides
    if not RunPaths(directory).config.is_file():
        raise ConfigError(
            f"{args.config}: a directory without a run (config.yaml); name a YAML file, or one of "
            f"the shipped configurations {', '.join(config_lib.shipped())}"
        )
    # Where it is now: it may have been moved.
    return RunPaths(directory).config, [f"run_dir={args.config}", *args.overrides]


def _completed(tree: dict[str, Any], *, training: bool) -> dict[str, Any]:
    return filled(in_todays_terms(tree), training=training)


def parse_arguments(prog: str | None = None) -> argparse.Namespace:
    """The command line: config, overrides, print_config and dry_run."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description=__doc__,
        epilog=f"configuration keys:\n{config_lib.describe()}\n\n{compilation_cache.HELP}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "config",
        nargs="?",
        help="YAML file, shipped name such as configs/tiny.yaml, or directory of a run",
    )
    add_settings(parser)
    args = parser.parse_intermixed_args()  # overrides may follow the options
    # The directory of a run may be named lr=0.1.
    if args.config is None or ("=" in args.config and not os.path.exists(args.config)):
        parser.error(
            f"no configuration is named; shipped are {', '.join(config_lib.shipped())}, such as "
            f"{parser.prog} tiny; the directory of a run continues it"
        )
    return args


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Adds what all commands that train take: overrides, and what to do instead of training."""
    parser.add_argument(
        "overrides", nargs="*", default=[], metavar="key=value", help="e.g. model.d_model=256"
    )
    parser.add_argument(
        "--print-config", action="store_true", help="print the resolved configuration and exit"
    )
    parser.add_argument(
        "--dry-run",
        type=int,
        metavar="DEVICES",
        help="compile a step for so many devices on the CPU and print its memory; nothing is run",
    )

"""Makes a dense model sparse: trains it on, and reports on both.

    python -m twell_jax.sparsify NAME --data FILE [FILE ...] [key=value ...]

NAME is a run of train.py, a model in Hugging Face's format, or its name on the hub, org/name or
org/name@revision (extra "hf"). The model decides vocabulary, shapes and tokenizer. First its
cross-entropy on held-out text is measured; then it is trained on with ReLU, and an L1 term moves it
to a target: the share of the neurons that 256 tokens use, on which the speed depends. The run's
directory, runs/NAME-sparse by default, ends with report.md and report.png: both models side by
side.

The settings are those of `configs/sparsify.yaml`, and what follows from the model; each can be
overridden, as for train.py, whose --help lists them: steps=500, batch_tokens=..., optimizer.lr=...,
union_target=0.2, run_dir=... The same command continues an interrupted run.
"""

import argparse
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from twell_jax import config as config_lib
from twell_jax.config import ConfigError
from twell_jax.inference import language_model
from twell_jax.inference.arguments import DIRECTORY, add_tasks, check_task_path, command_line
from twell_jax.models import sharding
from twell_jax.train import command, interrupt, recipe, utf8
from twell_jax.train.init_from import is_run
from twell_jax.train.report import Score
from twell_jax.train.run_directory import RunPaths, has_started

_SETTING = re.compile(r"[a-z][a-z0-9_.]*=.*", re.DOTALL)
_DATASET = "hf:"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    args = _parse(argv)
    score = None
    with interrupt.at_once():
        if args.tasks and not args.print_config and args.dry_run is None:
            _harness_tasks(args)  # which may not be there, as is known before the run
            score = _score(args)
        command.run(args, _settings, score)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = command_line(__doc__)
    parser.add_argument("name", metavar="NAME", help=DIRECTORY)
    parser.add_argument(
        "--data",
        nargs="+",
        action="extend",
        default=[],
        metavar="FILE",
        help="text, JSONL or JSON, or globs of them; or hf:NAME of a Hugging Face dataset "
        "(default: the data of NAME, if that is a run)",
    )
    command.add_settings(parser)
    add_tasks(parser, None, "none; the model is scored before training, and after")
    args = parser.parse_intermixed_args(argv)
    # What follows --data may be settings.
    args.overrides += [text for text in args.data if _SETTING.fullmatch(text)]
    args.data = [text for text in args.data if not _SETTING.fullmatch(text)]
    check_task_path(parser, args)
    if _SETTING.fullmatch(args.name) and not os.path.exists(args.name):
        parser.error("NAME: comes first, and says which model is made sparse")
    if len(args.data) > 1 and any(text.startswith(_DATASET) for text in args.data):
        parser.error("--data: takes files, or one hf:NAME")
    return args


def _settings(args: argparse.Namespace) -> tuple[Path, list[str]]:
    """The file of the configuration, and its overrides: those of the recipe, then the user's."""
    given = config_lib.parse(args.overrides)
    own = [f"init_from={args.name}", *_data(args.data), *args.overrides]
    last = Path(os.path.abspath(args.name)).name.partition("@")[0]  # of a hub's name, too
    run_dir = given.get("run_dir", f"runs/{last}-sparse")
    if isinstance(run_dir, str) and has_started(RunPaths(run_dir)):
        return RunPaths(run_dir).config, [f"run_dir={run_dir}", *own]
    with_data = given | config_lib.parse(_data(args.data))
    if not (is_run(args.name) or "data.source" in with_data):
        raise ConfigError(
            f"--data: names the text to train on, which only a run has, and {args.name} is none: "
            "--data FILE [FILE ...], or --data hf:NAME"
        )
    found = recipe.overrides(args.name, with_data)
    return config_lib.shipped()["sparsify"], [f"run_dir={run_dir}", *found, *own]


def _data(names: Sequence[str]) -> list[str]:
    if not names:
        return []
    if names[0].startswith(_DATASET):
        return ["data.source=hf", f"data.name={names[0].removeprefix(_DATASET)}"]
    return ["data.source=files", f"data.paths={json.dumps(names)}"]


def _harness_tasks(args: argparse.Namespace) -> Any:
    """The tasks of the harness, whose questions it may download; they are used once."""
    try:
        from twell_jax.inference import harness

        return harness.Tasks(args.tasks.split(","), args.task_path)
    except (ModuleNotFoundError, ValueError) as error:
        sys.exit(f"error: {error}")


def _score(args: argparse.Namespace) -> Score:
    """What scores a model on the tasks that the arguments name."""

    def score(name: str) -> dict[str, float]:
        from twell_jax.inference import harness

        # Models are loaded on one device, and the run's mesh is set.
        with jax.set_mesh(sharding.make_mesh((1, 1), jax.devices()[:1])):
            lm = language_model.load(name)
            try:
                results = harness.run_tasks(lm, _harness_tasks(args), limit=args.limit)
            except ValueError as error:
                raise ConfigError(f"--tasks: {error}") from None
        return harness.figures(results)

    return score


if __name__ == "__main__":
    main()

"""Scores a model on benchmarks, by EleutherAI's lm-evaluation-harness (extra "eval").

    python -m twell_jax.evaluate DIRECTORY [--tasks arc_easy,piqa] [--limit 100] [--out FILE.json]

DIRECTORY is a run of train.py or a model in Hugging Face's format. Where there is no such
directory, it is a name on the Hugging Face hub, org/name or org/name@revision (extra "hf").

The default tasks are the seven of arXiv 2603.23198; the harness downloads their questions.
"""

import argparse
import sys
from collections.abc import Sequence
from typing import get_args

from twell_jax.ffn import Implementation
from twell_jax.inference import language_model
from twell_jax.inference.arguments import (
    DIRECTORY,
    add_tasks,
    at_least,
    check_out,
    check_task_path,
    command_line,
    path,
)
from twell_jax.models.pretrained import hub
from twell_jax.train import compilation_cache, interrupt, utf8
from twell_jax.train.checkpoint_errors import CheckpointError

TASKS = "arc_easy,arc_challenge,hellaswag,openbookqa,piqa,winogrande,commonsense_qa"


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = command_line(__doc__, compilation_cache.HELP)
    parser.add_argument("directory", help=DIRECTORY)
    add_tasks(parser, TASKS, TASKS)
    parser.add_argument(
        "--shots", type=at_least(0), help="examples in a prompt (default: the task's)"
    )
    parser.add_argument(
        "--batch", type=at_least(1), default=16, help="sequences at a time (default: %(default)s)"
    )
    parser.add_argument(
        "--implementation",
        choices=get_args(Implementation),
        help="of the FFN (default: the faster one)",
    )
    parser.add_argument("--out", type=path, help="write the results as JSON")
    args = parser.parse_args(argv)
    check_task_path(parser, args)
    check_out(parser, args.out)
    with interrupt.at_once():
        compilation_cache.enable()
        _evaluate(args)


def _evaluate(args: argparse.Namespace) -> None:
    try:
        # It takes 1.5 s to import; --help and wrong arguments do not need it.
        from twell_jax.inference import harness

        hub.find(args.directory)  # before questions are downloaded
        tasks = harness.Tasks(args.tasks.split(","), args.task_path)
        lm = language_model.load(args.directory, args.implementation)
        results = harness.run_tasks(lm, tasks, shots=args.shots, limit=args.limit, batch=args.batch)
    except (ModuleNotFoundError, CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(harness.table(results))
    if args.out:
        try:
            args.out.write_text(harness.as_json(results))
        except OSError as error:
            sys.exit(f"error: --out: {error}")


if __name__ == "__main__":
    main()

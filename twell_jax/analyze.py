"""Shows what the neurons of a model do on text, and estimates what that gains on a GPU.

    python -m twell_jax.analyze RUN_DIR
        a run of train.py, on its own held-out text. Prints tables, writes RUN_DIR/analysis.json and
        draws plots beside it.
    python -m twell_jax.analyze MODEL --text FILE
        a run, a directory with a config.json or a name on the hub, on a text; writes no file.

No GPU is needed. On a Hopper GPU each layer is also timed.
"""

import json
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from twell_jax import config as config_lib
from twell_jax import data
from twell_jax.analysis.activity import Activity, measure_activity, summarise
from twell_jax.analysis.estimate import estimate
from twell_jax.analysis.plots import plot_activity
from twell_jax.analysis.report import tables
from twell_jax.analysis.speedup import Speedup, measure_speedup
from twell_jax.config import ConfigError
from twell_jax.data import marks
from twell_jax.ffn import CannotServe
from twell_jax.inference import arguments, language_model
from twell_jax.models import Transformer
from twell_jax.models.pretrained import PretrainedError
from twell_jax.plotting import title_of_run
from twell_jax.train import compilation_cache, interrupt, progress, utf8
from twell_jax.train.checkpoint_errors import CheckpointError
from twell_jax.train.durable import write_atomically
from twell_jax.train.run_directory import RunPaths, load_run, open_checkpoints

SEQUENCES, CONTEXT = 16, 2048  # of a text: how many by default, and the most tokens of one


def analyze(run_dir: str, sequences: int | None, console: Console) -> None:
    """Measures the active neurons of a run's last checkpoint; prints, writes and draws the results.

    Args:
      run_dir: directory of the run.
      sequences: number of held-out sequences; None takes the run's `eval_sequences`.
      console: prints the tables.

    Raises:
      ConfigError: there is no such run, or its data cannot be read or has changed.
      CheckpointError: no checkpoint is whole.
    """
    if not RunPaths(run_dir).config.exists():
        raise ConfigError(
            f"run_dir: {run_dir} is not the directory of a run; for another model name a text that "
            "it reads: --text FILE"
        )
    config, tokenizer, model = load_run(run_dir)
    paths = RunPaths(run_dir)
    if sequences is not None:
        config = config_lib.from_dict(config.model_dump() | {"eval_sequences": sequences})
    corpus = data.load(config, tokenizer)
    with open_checkpoints(paths, config) as checkpoints:
        position = checkpoints.restore_position()
    if position is None or corpus.fingerprint != position["corpus"]:
        raise ConfigError(
            f"data: the text is not that of the run in {run_dir}, and what is held out now may "
            "have been trained on; restore the old files"
        )
    document_end = tokenizer.eot_id if config.data.mask_documents else None
    activity = measure_activity(
        model, corpus.held_out, batch=config.micro_batch, document_end=document_end
    )
    speedup = _speedup(model, marks.ids(corpus.held_out), document_end, console)
    summary = _summary(model, activity, speedup)
    write_atomically(paths.analysis, json.dumps(summary) + "\n")
    _print(summary, console)
    measured = f"{summary['sequences']} sequences, {summary['tokens']:,} tokens"
    bits_per_byte = corpus.bits_per_byte(activity.ce)
    verdict = progress.verdict(activity.ce, corpus.unigram_cross_entropy, bits_per_byte)
    console.out(f"{measured}: {verdict}")
    console.out(f"analysis: {paths.analysis}")
    title = title_of_run(paths.directory, config)
    for path in plot_activity(activity, speedup, paths.directory, title):
        console.out(f"plot: {path}")


def analyze_on_text(name: str, text: Path, sequences: int | None, console: Console) -> None:
    """Measures the active neurons of a model on a text, and prints the results.

    Args:
      name: as of `language_model.load`.
      text: a file in UTF-8.
      sequences: at most so many are read; None takes `SEQUENCES`.
      console: prints the tables.

    Raises:
      ConfigError, CheckpointError, PretrainedError: there is no such model, it is not whole, or the
        text has less than two tokens.
      OSError: the text cannot be read.
    """
    words = arguments.words_of(text)
    lm = language_model.load(name)
    context = min(lm.model.config.context, CONTEXT)
    ids = lm.encode(words)[len(lm.prefix) :]
    # Each sequence begins as the model expects, and has one more token than is read.
    length = min(context + 1 - len(lm.prefix), len(ids))
    if length < 2:
        raise ConfigError(f"{text}: has {len(ids)} tokens, too few to read; name a longer text")
    rows = np.array(ids[: len(ids) // length * length], np.int32).reshape(-1, length)
    rows = rows[: sequences or SEQUENCES]
    tokens = np.concatenate([np.tile(np.array(lm.prefix, np.int32), (len(rows), 1)), rows], axis=1)
    activity = measure_activity(lm.model, tokens, batch=1)
    summary = _summary(lm.model, activity, _speedup(lm.model, tokens, None, console))
    _print(summary, console)
    measured = f"{summary['sequences']} sequences, {summary['tokens']:,} tokens"
    console.out(f"{measured}: cross-entropy {activity.ce:.3f} nats/token")


def _speedup(
    model: Transformer, sequences: np.ndarray, document_end: int | None, console: Console
) -> Speedup | None:
    """The times of the layers; None, after a line that says why, where they cannot be measured."""
    try:
        return measure_speedup(model, sequences, document_end=document_end)
    except CannotServe as error:
        console.out(f"speed-up not measured: {error.why}")
        return None


def _summary(model: Transformer, activity: Activity, speedup: Speedup | None) -> dict[str, Any]:
    """All that was measured, and what it is estimated to gain, ready for JSON."""
    estimated = estimate(model.config, activity)
    return summarise(activity) | {
        "speedup": speedup and speedup.summarise(),
        "estimate": asdict(estimated) | {"sentence": str(estimated)},
    }


def _print(summary: dict[str, Any], console: Console) -> None:
    for table in tables(summary):
        console.print(table)
    console.out(summary["estimate"]["sentence"])


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = arguments.command_line(__doc__)
    parser.add_argument("model", metavar="RUN_DIR | MODEL", help=arguments.DIRECTORY)
    parser.add_argument(
        "--text",
        type=arguments.path,
        metavar="FILE",
        help="a file in UTF-8 that the model reads (default: the held-out text of the run)",
    )
    parser.add_argument(
        "--sequences",
        type=arguments.at_least(1),
        help="held-out sequences (default: the run's eval_sequences), or those of the text "
        f"(default: at most {SEQUENCES})",
    )
    args = parser.parse_args(argv)
    console = Console(highlight=False)
    try:
        with interrupt.at_once():
            compilation_cache.enable()
            if args.text is not None:
                analyze_on_text(args.model, args.text, args.sequences, console)
            else:
                analyze(args.model, args.sequences, console)
    except (ConfigError, CheckpointError, PretrainedError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

"""Shows what the neurons of a trained run do on held-out text: python -m twell_jax.analyze RUN_DIR

Prints tables, writes RUN_DIR/analysis.json and draws plots beside it.
"""

import argparse
import json
import sys
from collections.abc import Sequence

from rich.console import Console

from twell_jax import config as config_lib
from twell_jax import data
from twell_jax.analysis.activity import measure_activity, summarise
from twell_jax.analysis.plots import plot_activity
from twell_jax.analysis.report import tables
from twell_jax.analysis.speedup import measure_speedup
from twell_jax.config import ConfigError
from twell_jax.data import marks
from twell_jax.ffn import CannotServe
from twell_jax.plotting import title_of_run
from twell_jax.train import interrupt, progress, utf8
from twell_jax.train.checkpoint import CheckpointError
from twell_jax.train.durable import write_atomically
from twell_jax.train.run_directory import RunPaths, load_run, open_checkpoints


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
    try:
        sequences_read = marks.ids(corpus.held_out)
        speedup = measure_speedup(model, sequences_read, document_end=document_end)
    except CannotServe as error:
        speedup = None
        console.out(f"speed-up not measured: {error.why}", highlight=False)
    summary = summarise(activity) | {"speedup": speedup and speedup.summarise()}
    write_atomically(paths.analysis, json.dumps(summary) + "\n")
    for table in tables(summary):
        console.print(table)
    measured = f"{summary['sequences']} sequences, {summary['tokens']:,} tokens"
    bits_per_byte = corpus.bits_per_byte(activity.ce)
    verdict = progress.verdict(activity.ce, corpus.unigram_cross_entropy, bits_per_byte)
    console.out(f"{measured}: {verdict}", highlight=False)
    console.out(f"analysis: {paths.analysis}", highlight=False)
    title = title_of_run(paths.directory, config)
    for path in plot_activity(activity, speedup, paths.directory, title):
        console.out(f"plot: {path}", highlight=False)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", help="directory of a run, such as runs/tiny")
    parser.add_argument(
        "--sequences", type=int, help="held-out sequences (default: the run's eval_sequences)"
    )
    args = parser.parse_args(argv)
    try:
        with interrupt.at_once():
            analyze(args.run_dir, args.sequences, Console())
    except (ConfigError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

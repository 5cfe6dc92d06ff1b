"""Shows a finished run: a table of its layers, its held-out loss and plots."""

from rich.console import Console

from twell_jax.config import Config, ConfigError
from twell_jax.train import metrics, progress
from twell_jax.train.plots import plot_run
from twell_jax.train.run_directory import RunPaths


def show_result(config: Config, paths: RunPaths, unigram_ce: float, console: Console) -> None:
    """Prints the table and the held-out cross-entropy, and draws the plots into the run directory.

    Args:
      config: the run.
      paths: its directory.
      unigram_ce: cross-entropy of the unigram baseline, in nats per token.
      console: where to print.

    Raises:
      ConfigError: metrics.jsonl does not hold the records of the run.
    """
    records = metrics.read(paths.metrics)
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    if not (steps and evaluations):
        raise ConfigError(f"{paths.metrics}: the records of this run are gone; nothing to show")
    console.print(progress.layer_table(steps[-1], config.model.d_ff))
    console.out(progress.verdict(evaluations[-1]["held_out_ce"], unigram_ce), highlight=False)
    for path in plot_run(records, config.model.d_ff, unigram_ce, paths.directory):
        console.out(f"plot: {path}", highlight=False)

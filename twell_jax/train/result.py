"""Shows a run: its plots while it goes on, and at its end its layers and its held-out loss, too."""

from pathlib import Path

import jax
from rich.console import Console

from twell_jax.config import Config, ConfigError
from twell_jax.train import metrics, pace, progress
from twell_jax.train.run_directory import RunPaths


def show_result(config: Config, paths: RunPaths, unigram_ce: float, console: Console) -> None:
    """Prints the table, the held-out cross-entropy and the gain in speed, and draws the plots.

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
    if faster := pace.against_dense_start(steps):
        console.out(faster, highlight=False)
    for path in redraw(config, paths, console):
        console.out(f"plot: {path}", highlight=False)


def redraw(config: Config, paths: RunPaths, console: Console) -> list[Path]:
    """Draws the plots of what a run has logged; the first of its processes does.

    Args:
      config: the run.
      paths: its directory.
      console: where to warn if plots cannot be drawn. That never ends a run.

    Returns:
      The paths of the plots that were drawn.
    """
    if jax.process_index() > 0:
        return []
    try:
        from twell_jax.train.plots import plot_run  # loads matplotlib, which may itself fail

        return plot_run(config, paths)
    except Exception as error:
        warning = f"warning: plots not drawn: {type(error).__name__}: {error}"
        console.out(warning, highlight=False)
        return []

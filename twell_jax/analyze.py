"""Shows what the neurons of a trained run do on held-out text: python -m twell_jax.analyze RUN_DIR

Prints tables, writes RUN_DIR/analysis.json and draws plots beside it.
"""

import argparse
import json
import sys
from collections.abc import Iterable
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from twell_jax import config as config_lib
from twell_jax import data
from twell_jax.analysis.activity import measure_activity, summarise
from twell_jax.analysis.plots import plot_activity
from twell_jax.analysis.speedup import measure_speedup
from twell_jax.config import ConfigError
from twell_jax.ffn.api import CannotServe
from twell_jax.train import progress as display
from twell_jax.train.checkpoint import CheckpointError, Checkpoints
from twell_jax.train.run_directory import RunPaths, load_run, write_atomically


def analyze(run_dir: str, sequences: int | None, console: Console) -> None:
    """Measures, prints, writes and draws what the last checkpoint of a run fires.

    Args:
      run_dir: directory of the run.
      sequences: held-out sequences to take; None takes the run's `eval_sequences`.
      console: where to print.

    Raises:
      ConfigError: there is no such run, or its data cannot be read or is not what it was.
      CheckpointError: no checkpoint is whole.
    """
    config, tokenizer, model = load_run(run_dir)
    paths = RunPaths(run_dir)
    if sequences is not None:
        config = config_lib.from_dict(config.model_dump() | {"eval_sequences": sequences})
    corpus = data.load(config)
    with Checkpoints(paths.checkpoints, config.checkpoint_keep) as checkpoints:
        trained_on = checkpoints.restore_position()["corpus"]
    if corpus.fingerprint != trained_on:
        raise ConfigError(
            f"data: the text is not that of the run in {run_dir}, and what is held out now may "
            "have been trained on; restore the old files"
        )
    document_end = tokenizer.eot_id if config.data.mask_documents else None
    activity = measure_activity(
        model, corpus.held_out, batch=config.micro_batch, document_end=document_end
    )
    try:
        speedup = measure_speedup(model, corpus.held_out, document_end=document_end)
    except CannotServe as error:
        speedup = None
        console.out(f"speed-up not measured: {error}", highlight=False)
    summary = summarise(activity) | {"speedup": speedup and speedup.summarise()}
    write_atomically(paths.analysis, json.dumps(summary) + "\n")
    for table in tables(summary):
        console.print(table)
    measured = f"{summary['sequences']} sequences, {summary['tokens']:,} tokens"
    verdict = display.verdict(activity.ce, corpus.unigram_cross_entropy)
    console.out(f"{measured}: {verdict}", highlight=False)
    console.out(f"analysis: {paths.analysis}", highlight=False)
    for path in plot_activity(activity, speedup, paths.directory):
        console.out(f"plot: {path}", highlight=False)


def tables(summary: dict[str, Any]) -> list[Table]:
    """What analysis.json holds, as tables with a row per layer."""
    d_ff = summary["d_ff"]
    fired = _table(
        f"neurons of {d_ff} that fire for a token",
        {
            "mean": _format(summary["nnz_mean"], ".1f"),
            "p50": _format(summary["nnz_p50"], ".0f"),
            "p99": _format(summary["nnz_p99"], ".0f"),
            "max": _format(summary["nnz_max"], "d"),
            "sparsity": _format(summary["sparsity"], ".1%"),
            "dead": [f"{dead} ({dead / d_ff:.1%})" for dead in summary["dead"]],
        },
    )
    by_position = np.array(summary["nnz_by_position"])
    ranges = _position_ranges(by_position.shape[1])
    positions = _table(
        "mean by position in the sequence",
        {
            f"{start}-{stop - 1}" if stop - start > 1 else str(start): _format(
                by_position[:, start:stop].mean(axis=1), ".1f"
            )
            for start, stop in ranges
        },
    )
    shared = _table(
        "neurons that any of n tokens in a row fires",
        {size: _format(shares, ".1%") for size, shares in summary["union"].items()},
    )
    top = _table(
        "activations that the most used neurons have",
        {f"top {k} %": _format(shares, ".1%") for k, shares in summary["top_percent"].items()},
    )
    speedup = summary["speedup"]
    return [fired, positions, shared, top, *([_speedup_table(speedup)] if speedup else [])]


def _speedup_table(speedup: dict[str, Any]) -> Table:
    return _table(
        f"feed-forward block, forward, {speedup['tokens']:,} tokens on {speedup['device']}",
        {
            "mean nnz": _format(speedup["nnz"], ".1f"),
            "dense XLA, ms": _format(speedup["xla_ms"], ".3f"),
            "kernels, ms": _format(speedup["mosaic_ms"], ".3f"),
            "speed-up": _format(speedup["factor"], ".2f"),
            "error, XLA": _format(speedup["xla_error"], ".1e"),
            "error, kernels": _format(speedup["mosaic_error"], ".1e"),
        },
    )


def _table(title: str, columns: dict[str, list[str]]) -> Table:
    table = Table(title=title)
    for heading in ("layer", *columns):
        table.add_column(heading, justify="right")
    for layer, row in enumerate(zip(*columns.values(), strict=True)):
        table.add_row(str(layer), *row)
    return table


def _format(values: Iterable[float], spec: str) -> list[str]:
    return [format(value, spec) for value in values]


def _position_ranges(length: int) -> list[tuple[int, int]]:
    """[0, 1), [1, 4), [4, 16), ... up to length."""
    starts = [0]
    while (start := max(1, 4 * starts[-1])) < length:
        starts.append(start)
    return list(zip(starts, [*starts[1:], length], strict=True))


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", help="directory of a run, such as runs/tiny")
    parser.add_argument(
        "--sequences", type=int, help="held-out sequences (default: the run's eval_sequences)"
    )
    args = parser.parse_args()
    try:
        analyze(args.run_dir, args.sequences, Console())
    except (ConfigError, CheckpointError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

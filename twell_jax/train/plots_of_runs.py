"""Plots several runs in one figure, from the records of their `metrics.jsonl`, as PNG."""

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.lines import Line2D

from twell_jax.config import ConfigError
from twell_jax.plotting import drawn, literal, of_last_part, over_decades
from twell_jax.train import metrics
from twell_jax.train.run_directory import RunPaths, load_config


def plot_runs(directories: Sequence[str], path: Path) -> None:
    """Draws loss, nnz and speed of runs over the tokens that they were trained on.

    A run has one colour in all panels. The axis of the loss shows the later part of the runs, in
    which they differ. The runs may be going on.

    Args:
      directories: of the runs, at least one.
      path: the file.

    Raises:
      ConfigError: a directory holds no run, or its metrics.jsonl no step or a broken line.
    """
    runs = {}
    for name, directory in zip(_names(directories), directories, strict=True):
        paths = RunPaths(directory)
        batch_tokens, records = load_config(directory).batch_tokens, metrics.read(paths.metrics)
        if not any("ce" in record for record in records):
            raise ConfigError(f"{paths.metrics}: holds no step of the run to draw")
        runs[name] = [record | {"tokens": record["step"] * batch_tokens} for record in records]
    with drawn(path, height=9 + 0.25 * len(runs)) as figure:
        loss, nnz, speed = figure.subplots(3, 1, sharex=True, height_ratios=[4, 3, 2])
        lines = [
            _plot_run(loss, nnz, speed, literal(name), records, f"C{index}")
            for index, (name, records) in enumerate(runs.items())
        ]
        of_last_part(loss, since=0.2)
        over_decades(nnz, "y")
        loss.set(ylabel="cross-entropy (nats/token)\ndots: held-out, thin: training")
        nnz.set(ylabel="non-zeros per token,\nmean over layers")
        speed.set(xlabel="tokens", ylabel="tokens per second", ylim=(0, None))
        speed.yaxis.set_major_formatter("{x:,.0f}")
        # Named one by one: a legend by itself leaves out what begins with "_".
        labels = [str(line.get_label()) for line in lines]
        figure.legend(lines, labels, loc="outside upper left", ncols=1)


def _names(directories: Sequence[str]) -> list[str]:
    """What tells directories apart: their own names, or with the first ones above that differ."""
    parts = [Path(os.path.realpath(directory)).parts for directory in directories]
    if len(set(parts)) < len(parts):
        raise ConfigError("run_dir: a run is named twice")
    depth = 1
    while len({part[-depth:] for part in parts}) < len(parts):
        depth += 1
    return [str(Path(*part[-depth:])) for part in parts]


def _plot_run(
    loss: Axes, nnz: Axes, speed: Axes, name: str, records: list[dict[str, Any]], color: str
) -> Line2D:
    """Draws a run in the three panels; returns the line that stands for it in the legend."""
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    at = [record["tokens"] for record in steps]
    lines: list[Line2D] = []
    if evaluations:
        last = evaluations[-1]["held_out_ce"]
        lines += loss.plot(
            [record["tokens"] for record in evaluations],
            [record["held_out_ce"] for record in evaluations],
            "o-",
            ms=3,
            color=color,
            label=f"{name}, held-out CE {last:.3f}",
        )
    ce = [record["ce"] for record in steps]
    lines += loss.plot(at, ce, lw=0.7, alpha=0.5, color=color, label=name)
    nnz.plot(at, [np.mean(record["nnz"]) for record in steps], lw=1.2, color=color)
    rates = np.array([record["tokens_per_second"] for record in steps])
    speed.plot(at, np.where(rates > 0, rates, np.nan), lw=1.2, color=color)  # 0: not measured yet
    return lines[0]

"""Plots a run's training from the records of `metrics.jsonl`, as PNG."""

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import PercentFormatter

from twell_jax.config import Config, ConfigError
from twell_jax.plotting import (
    QUIET,
    drawn,
    drawn_by_layer,
    label_bars,
    legend_above,
    of_last_part,
    scale_to_neurons,
    title_of_run,
)
from twell_jax.train import metrics
from twell_jax.train.pace import Record, sparse_layers
from twell_jax.train.report import source_name
from twell_jax.train.run_directory import RunPaths


def plot_run(config: Config, paths: RunPaths) -> list[Path]:
    """Draws `training.png` (loss, nnz, U and speed over steps) and `layers.png` (nnz and U of each
    layer).

    A run with a target has one more panel in `training.png`, with the L1 coefficient. Steps of
    fewer than 256 tokens on a device, and of version 0.2, have no U.
    The run may be going on: what its `metrics.jsonl` holds so far is drawn.

    Args:
      config: the run.
      paths: its directory.

    Returns:
      The paths of the plots.

    Raises:
      ConfigError: metrics.jsonl holds no step, or a broken line.
    """
    records = metrics.read(paths.metrics)
    steps = _steps(config, paths, records)
    title, d_ff = title_of_run(paths.directory, config), config.model.d_ff
    training, layers = paths.directory / "training.png", paths.directory / "layers.png"
    others = [_plot_union] if any("mean_union" in record for record in steps) else []
    others += [_plot_coefficient] * bool(config.targets)
    heights = [3, 3, *(3 for _ in others), 2]
    with drawn(training, height=1 + sum(heights), title=title) as figure:
        loss, nnz, *panels, speed = figure.subplots(
            len(heights), 1, sharex=True, height_ratios=heights
        )
        _plot_loss(loss, records)
        _plot_nnz(nnz, steps, d_ff, config.sparsity_target)
        for plot, axes in zip(others, panels, strict=True):
            plot(axes, steps)
        _plot_speed(speed, steps)
    with drawn_by_layer(layers, config.model.layers, d_ff, title, bars=3) as axes:
        _plot_layers(axes, steps[-1], d_ff)
    return [training, layers]


def plot_report(config: Config, paths: RunPaths) -> list[Path]:
    """Draws `report.png`: cross-entropy, nnz and U over steps, and U of each layer at the end.

    A line marks the cross-entropy of the model that the run began with, if there was one. Of steps
    that have no U, nnz of each layer is shown.

    Args, Returns, Raises: see `plot_run`.
    """
    records = metrics.read(paths.metrics)
    steps, layers = _steps(config, paths, records), config.model.layers
    has_union, path = "mean_union" in steps[-1], paths.directory / "report.png"
    heights = [2.6, 2.2, *([2.2] if has_union else []), 0.8 + 0.2 * layers]
    with drawn(path, 1 + sum(heights), title_of_run(paths.directory, config)) as figure:
        loss, *over_steps, by_layer = figure.subplots(len(heights), 1, height_ratios=heights)
        _plot_quality(loss, records)
        _plot_nnz(over_steps[0], steps, config.model.d_ff, config.sparsity_target)
        if has_union:
            _plot_union(over_steps[1], steps)
        for axes in (loss, *over_steps):
            axes.set_xlim(0, config.steps)
            axes.tick_params(labelbottom=axes is over_steps[-1])
            axes.xaxis.get_major_locator().set_params(integer=True)
        over_steps[0].set_ylabel(f"neurons of {config.model.d_ff}\nactive for a token")
        over_steps[-1].set_xlabel("step")
        _plot_bars(by_layer, steps[-1], "mean_union" if has_union else "nnz")
    return [path]


def _plot_bars(axes: Axes, record: Record, key: str) -> None:
    """A bar for each layer, from the top down, with its U or its mean nnz in a step."""
    values, layers, is_union = record[key], len(record[key]), key == "mean_union"
    bars = axes.barh(range(layers), values, 0.6)
    form = "{:.1%}" if is_union else "{:.1f}"
    label_bars(axes, bars, [form.format(value) for value in values])
    axes.set(ylabel="layer", yticks=range(layers), ylim=(layers - 0.4, -0.6))
    axes.set_xlabel(f"{'U' if is_union else 'neurons active for a token'}, step {record['step']}")
    axes.grid(axis="y", visible=False)
    axes.set_xlim(0, 1.1 if is_union else 1.15 * max(*values, 1))
    if is_union:
        axes.xaxis.set_major_formatter(PercentFormatter(1))


def _steps(config: Config, paths: RunPaths, records: Sequence[Record]) -> list[Record]:
    """The records of steps.

    Raises:
      ConfigError: there is none.
    """
    if steps := [record for record in records if "ce" in record]:
        return steps
    raise ConfigError(
        f"{paths.metrics}: holds no step of the run, so there is nothing to draw; "
        f"the run logs every {config.log_every} steps (log_every)"
    )


def _plot_quality(axes: Axes, records: Sequence[Record]) -> None:
    """The later part of what training and held-out text tell of a run, in one colour."""
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    axes.plot(*_over_steps(steps, "ce"), lw=0.8, alpha=0.5, color="C0", label="training")
    if evaluations:
        label = f"held-out, last {evaluations[-1]['held_out_ce']:.3f}"
        axes.plot(*_over_steps(evaluations, "held_out_ce"), "o-", ms=3, color="C0", label=label)
    _mark_source(axes, records[0])
    of_last_part(axes, since=0.2)
    axes.set_ylabel("cross-entropy\n(nats/token)")
    legend_above(axes)


def _plot_loss(axes: Axes, records: Sequence[Record]) -> None:
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    axes.plot(*_over_steps(steps, "ce"), lw=1, label=f"training, last {steps[-1]['ce']:.3f}")
    if evaluations:
        last = evaluations[-1]
        label = f"held-out, last {last['held_out_ce']:.3f}"
        axes.plot(*_over_steps(evaluations, "held_out_ce"), "o-", ms=3, label=label)
        unigram = last.get("unigram_ce")  # not in runs of version 0.2
        if unigram is not None and source_name(records[0]) is None:
            label = f"unigram baseline {unigram:.3f}"
            axes.axhline(unigram, color=QUIET, ls="--", lw=1, label=label)
    _mark_source(axes, records[0])
    axes.set_ylabel("cross-entropy (nats/token)")
    legend_above(axes)


def _mark_source(axes: Axes, first: Record) -> None:
    """Draws a line at the held-out cross-entropy of the model that a run began with, if any."""
    if name := source_name(first):
        label = f"{name}, held-out, {first['source_ce']:.3f}"
        axes.axhline(first["source_ce"], color=QUIET, ls="--", lw=1.2, label=label)


def _plot_nnz(axes: Axes, steps: Sequence[Record], d_ff: int, target: float | None) -> None:
    at, nnz = _over_steps(steps, "nnz")
    last = nnz[-1].mean()
    axes.fill_between(at, nnz.min(1), nnz.max(1), alpha=0.2, lw=0, label="layers, range")
    label = f"layers, mean, last {last:.1f} ({1 - last / d_ff:.1%} zeros)"
    axes.plot(at, nnz.mean(1), label=label)
    if "live" in steps[-1]:
        live = _over_steps(steps, "live")[1].mean(1)
        axes.plot(at, live, label=f"computed, mean, last {live[-1]:.0f}")
    if target is not None:
        axes.axhline(target, color=QUIET, lw=1, label=f"target {target:g}")
    scale_to_neurons(axes, "y", d_ff)
    legend_above(axes)


def _plot_union(axes: Axes, steps: Sequence[Record]) -> None:
    steps = [record for record in steps if "mean_union" in record]
    at, union = _over_steps(steps, "mean_union")
    axes.fill_between(at, union.min(1), union.max(1), alpha=0.2, lw=0, label="layers, range")
    axes.plot(at, union.mean(1), label=f"layers, mean, last {union[-1].mean():.1%}")
    if (target := steps[-1].get("union_target")) is not None:
        axes.axhline(target, color=QUIET, lw=1, label=f"target {target:.1%}")
    axes.set(ylabel="U: neurons that\n256 tokens use", ylim=(0, 1.02))
    axes.yaxis.set_major_formatter(PercentFormatter(1))
    legend_above(axes)


def _plot_coefficient(axes: Axes, steps: Sequence[Record]) -> None:
    at, coefficient = _over_steps(steps, "l1_coefficient")
    layers = coefficient[:, None] * _over_steps(steps, "l1_multipliers")[1]
    axes.fill_between(at, layers.min(1), layers.max(1), alpha=0.2, lw=0, label="layers, range")
    axes.plot(at, coefficient, label=f"without multipliers, last {coefficient[-1]:.2e}")
    axes.set(ylabel="L1 coefficient", yscale="log")
    legend_above(axes)


def _plot_speed(axes: Axes, steps: Sequence[Record]) -> None:
    at, rates = _over_steps(steps, "tokens_per_second")
    label = f"tokens per second, last {rates[-1]:,.0f}"
    axes.margins(y=0.2)  # so that a share of 100 % is above
    axes.plot(at, np.where(rates > 0, rates, np.nan), label=label)  # zero is not measured yet
    axes.set(xlabel="step", xlim=(0, None), ylabel="tokens per second", ylim=(0, None))
    axes.yaxis.set_major_formatter("{x:,.0f}")
    legend_above(axes)
    if not any("sparse_gradients" in record for record in steps):
        return
    sparse, layers = [sparse_layers(record) for record in steps], len(steps[-1]["nnz"])
    shares = axes.twinx()
    label = f"layers with sparse gradients, last {sparse[-1]} of {layers}"
    shares.plot(at, np.array(sparse) / layers, color="C1", drawstyle="steps-pre", label=label)
    shares.set(ylabel="share of layers", ylim=(-0.02, 1.02))
    shares.yaxis.set_major_formatter(PercentFormatter(1))
    shares.grid(visible=False)
    shares.legend(loc="lower right", bbox_to_anchor=(1, 1), fontsize="small", borderaxespad=0.2)


def _over_steps(records: Sequence[Record], key: str) -> tuple[np.ndarray, np.ndarray]:
    return np.array([r["step"] for r in records]), np.array([r[key] for r in records])


def _plot_layers(axes: Axes, record: Record, d_ff: int) -> None:
    at = np.arange(len(record["nnz"]))
    mean = axes.barh(at - 0.28, record["nnz"], 0.26, label="mean")
    largest = axes.barh(at, record["max_nnz"], 0.26, label="largest", alpha=0.4, color="C0")
    shares = [f"{nnz:.1f} ({1 - nnz / d_ff:.1%} zeros)" for nnz in record["nnz"]]
    label_bars(axes, mean, shares)
    label_bars(axes, largest, list(map(str, record["max_nnz"])))
    if "mean_union" in record:
        used = d_ff * np.array(record["mean_union"])
        label = "any of 256 tokens (U)"
        together = axes.barh(at + 0.28, used, 0.26, label=label, color="C1")
        label_bars(axes, together, [f"U {union:.1%}" for union in record["mean_union"]])
    axes.set_title(f"step {record['step']}", loc="left", fontsize="medium")

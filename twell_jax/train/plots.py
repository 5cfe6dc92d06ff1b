"""PNG plots of a run: its training, from the records of `metrics.jsonl`, and its neurons."""

from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np
from matplotlib.ticker import MaxNLocator

from twell_jax.analysis.activity import Activity, concentration
from twell_jax.analysis.speedup import Speedup

plt.rcParams.update({"axes.spines.top": False, "axes.spines.right": False, "figure.dpi": 150})


def plot_run(
    records: list[dict[str, Any]], d_ff: int, unigram_ce: float, directory: Path
) -> list[Path]:
    """Draws `training.png` (loss and sparsity over time) and `layers.png` (nnz per layer)."""
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    return [
        _plot_training(steps, evaluations, d_ff, unigram_ce, directory / "training.png"),
        _plot_layers(steps[-1], d_ff, directory / "layers.png"),
    ]


def plot_activity(activity: Activity, speedup: Speedup | None, directory: Path) -> list[Path]:
    """Draws `nnz_by_layer.png`, `nnz_by_position.png`, `union.png`, `usage.png`, and, where it was
    measured, `speedup.png`."""
    drawn = [_plot_speedup(speedup, directory / "speedup.png")] if speedup else []
    return [
        *drawn,
        _plot_nnz_by_layer(activity, directory / "nnz_by_layer.png"),
        _plot_nnz_by_position(activity, directory / "nnz_by_position.png"),
        _plot_union(activity, directory / "union.png"),
        _plot_usage(activity, directory / "usage.png"),
    ]


def _plot_training(steps, evaluations, d_ff, unigram_ce, path):
    at = [record["step"] for record in steps]
    figure, (loss, sparsity) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    loss.plot(at, [record["ce"] for record in steps], lw=1, label="training")
    at_evaluation = [record["step"] for record in evaluations]
    held_out = [record["held_out_ce"] for record in evaluations]
    loss.plot(at_evaluation, held_out, "o-", ms=3, label="held-out")
    loss.axhline(unigram_ce, color="gray", ls="--", lw=1, label="unigram baseline")
    loss.set_ylabel("cross-entropy (nats/token)")
    loss.legend(frameon=False)

    share = 100 * (1 - np.array([record["nnz"] for record in steps]) / d_ff)
    sparsity.fill_between(at, share.min(1), share.max(1), alpha=0.2, lw=0, label="layers, range")
    sparsity.plot(at, share.mean(1), label="layers, mean")
    sparsity.set(xlabel="step", ylabel="zeros among hidden activations (%)", ylim=(None, 100))
    sparsity.legend(frameon=False, loc="lower right")
    return _save(figure, path)


def _plot_layers(record, d_ff, path):
    layers = np.arange(len(record["nnz"]))
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.bar(layers - 0.2, record["nnz"], 0.4, label="mean")
    axes.bar(layers + 0.2, record["max_nnz"], 0.4, label="max", alpha=0.5)
    axes.axhline(d_ff, color="gray", ls="--", lw=1, label="dense")
    axes.set(
        yscale="symlog", xlabel="layer", ylabel="non-zero activations per token", xticks=layers
    )
    axes.set_title(f"step {record['step']}", loc="left", fontsize="medium")
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return _save(figure, path)


def _plot_nnz_by_layer(activity, path):
    layers, d_ff = activity.usage.shape
    low, p50, p99 = np.percentile(activity.nnz, (1, 50, 99), axis=(1, 2))
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    at = np.arange(layers)
    axes.bar(at, p99 - low, 0.5, low, alpha=0.3, label="1st-99th percentile")
    axes.hlines(p50, at - 0.25, at + 0.25, lw=2, label="median")
    axes.plot(at, activity.nnz.mean(axis=(1, 2)), "ko", ms=4, label="mean")
    axes.axhline(d_ff, color="gray", ls="--", lw=1, label="dense")
    axes.set(yscale="symlog", xlabel="layer", ylabel="neurons that fire for a token")
    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    figure.legend(loc="outside upper right", ncols=4, frameon=False)
    return _save(figure, path)


def _plot_nnz_by_position(activity, path):
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    position = np.arange(1, activity.nnz.shape[2] + 1)
    _plot_layer_lines(axes, position, activity.nnz.mean(axis=1))
    axes.set(
        xscale="log", xlabel="position in the sequence", ylabel="neurons that fire, mean", ylim=0
    )
    return _save(figure, path)


def _plot_union(activity, path):
    sizes = list(activity.union)
    share = activity.usage / activity.nnz[0].size  # of the tokens that a neuron fires for
    measured = np.stack(list(activity.union.values()), axis=1)
    # Of n tokens drawn at random, any fires a neuron of share p with probability 1 - (1 - p)^n.
    every_size = np.arange(1, sizes[-1] + 1)
    independent = np.stack([1 - np.mean((1 - share) ** n, axis=1) for n in every_size], axis=1)
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    _plot_layer_lines(axes, sizes, 100 * measured, "o-")
    for line, y in zip(axes.get_lines(), independent, strict=True):
        axes.plot(every_size, 100 * y, ls=":", lw=1, color=line.get_color())
    axes.set(xlabel="tokens", ylabel="neurons that any of them fires (%)", ylim=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.plot([], [], "o-", color="gray", label="consecutive")
    axes.plot([], [], ":", color="gray", label="drawn at random")
    axes.legend(frameon=False, loc="upper left")
    return _save(figure, path)


def _plot_usage(activity, path):
    d_ff = activity.usage.shape[1]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    neurons = 100 * np.arange(1, d_ff + 1) / d_ff
    _plot_layer_lines(axes, neurons, 100 * concentration(activity.usage))
    axes.plot([0, 100], [0, 100], color="gray", ls="--", lw=1, label="if all were used alike")
    axes.set(xlabel="most used neurons (%)", ylabel="share of the activations (%)", ylim=0)
    axes.legend(frameon=False, loc="lower right")
    return _save(figure, path)


def _plot_speedup(speedup, path):
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.plot(speedup.nnz, speedup.factor, "o", ms=5)
    for layer, point in enumerate(zip(speedup.nnz, speedup.factor, strict=True)):
        axes.annotate(
            str(layer), point, xytext=(4, 4), textcoords="offset points", fontsize="small"
        )
    axes.axhline(1, color="gray", ls="--", lw=1)
    axes.set(xlabel="mean non-zeros per token", ylabel="speed-up over dense XLA", ylim=(0, None))
    title = f"feed-forward block of each layer, {speedup.device}"
    if len(speedup.nnz) > 2:
        title += f", r = {np.corrcoef(speedup.nnz, speedup.factor)[0, 1]:.3f}"
    axes.set_title(title, loc="left", fontsize="medium")
    return _save(figure, path)


def _plot_layer_lines(axes, x, layers, style="-"):
    """Draws a line per layer, coloured by depth."""
    colors = plt.cm.ScalarMappable(plt.Normalize(0, max(1, len(layers) - 1)), "winter")
    for layer, y in enumerate(layers):
        axes.plot(x, y, style, ms=3, lw=1.2, color=colors.to_rgba(layer))
    axes.figure.colorbar(colors, ax=axes, label="layer", ticks=MaxNLocator(integer=True))


def _save(figure, path):
    figure.savefig(path)
    plt.close(figure)
    return path

"""Plots which neurons of a model fire on held-out text, and how much the kernels gain, as PNG."""

from pathlib import Path

import numpy as np
from matplotlib.ticker import MaxNLocator

from twell_jax.analysis.activity import Activity, concentration
from twell_jax.analysis.speedup import Speedup
from twell_jax.plotting import plt, save


def plot_activity(activity: Activity, speedup: Speedup | None, directory: Path) -> list[Path]:
    """Draws `nnz_by_layer.png`, `nnz_by_position.png`, `union.png` and `usage.png`.

    If a speed-up is given, it also draws `speedup.png`. Returns the paths of all plots.
    """
    drawn = [_plot_speedup(speedup, directory / "speedup.png")] if speedup else []
    return [
        *drawn,
        _plot_nnz_by_layer(activity, directory / "nnz_by_layer.png"),
        _plot_nnz_by_position(activity, directory / "nnz_by_position.png"),
        _plot_union(activity, directory / "union.png"),
        _plot_usage(activity, directory / "usage.png"),
    ]


def _plot_nnz_by_layer(activity: Activity, path: Path) -> Path:
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
    return save(figure, path)


def _plot_nnz_by_position(activity: Activity, path: Path) -> Path:
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    position = np.arange(1, activity.nnz.shape[2] + 1)
    _plot_layer_lines(axes, position, activity.nnz.mean(axis=1))
    axes.set(
        xscale="log", xlabel="position in the sequence", ylabel="neurons that fire, mean", ylim=0
    )
    return save(figure, path)


def _plot_union(activity: Activity, path: Path) -> Path:
    sizes = list(activity.union)
    share = activity.usage / activity.nnz[0].size  # of the tokens for which a neuron fires
    measured = np.stack(list(activity.union.values()), axis=1)
    # If a neuron fires for a share p of the tokens, at least one of n tokens drawn at random fires
    # it with probability 1 - (1 - p)^n.
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
    return save(figure, path)


def _plot_usage(activity: Activity, path: Path) -> Path:
    d_ff = activity.usage.shape[1]
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    neurons = 100 * np.arange(1, d_ff + 1) / d_ff
    _plot_layer_lines(axes, neurons, 100 * concentration(activity.usage))
    axes.plot([0, 100], [0, 100], color="gray", ls="--", lw=1, label="if all were used equally")
    axes.set(xlabel="most used neurons (%)", ylabel="share of the activations (%)", ylim=0)
    axes.legend(frameon=False, loc="lower right")
    return save(figure, path)


def _plot_speedup(speedup: Speedup, path: Path) -> Path:
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
    return save(figure, path)


def _plot_layer_lines(
    axes: plt.Axes, x: np.typing.ArrayLike, layers: np.ndarray, style: str = "-"
) -> None:
    """Draws a line per layer, coloured by depth."""
    colors = plt.cm.ScalarMappable(plt.Normalize(0, max(1, len(layers) - 1)), "winter")
    shades = colors.to_rgba(np.arange(len(layers)))
    for y, shade in zip(layers, shades, strict=True):
        axes.plot(x, y, style, ms=3, lw=1.2, color=shade)
    axes.figure.colorbar(colors, ax=axes, label="layer", ticks=MaxNLocator(integer=True))

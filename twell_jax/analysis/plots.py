"""Plots which neurons are active on held-out text, and how much the kernels gain, as PNG."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
from matplotlib import colormaps
from matplotlib.axes import Axes
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize
from matplotlib.ticker import MaxNLocator

from twell_jax.analysis.activity import Activity, concentration
from twell_jax.analysis.speedup import Speedup
from twell_jax.plotting import (
    QUIET,
    drawn,
    drawn_by_layer,
    label_bars,
    legend_above,
    scale_over_decades,
    scale_to_neurons,
)


def plot_activity(
    activity: Activity, speedup: Speedup | None, directory: Path, title: str
) -> list[Path]:
    """Draws `nnz_by_layer.png`, `nnz_by_position.png`, `union.png` and `usage.png`.

    If a speed-up is given, it also draws `speedup.png`.

    Args:
      activity: which neurons were active.
      speedup: how much the kernels gain in each layer.
      directory: where the plots go.
      title: of every plot; it says which model it is.

    Returns:
      The paths of the plots.
    """
    layers, d_ff = activity.usage.shape
    by_layer = directory / "nnz_by_layer.png"
    with drawn_by_layer(by_layer, layers, d_ff, title) as axes:
        _plot_nnz_by_layer(axes, activity)
    panels: dict[str, Callable[[Axes], None]] = {
        "nnz_by_position": partial(_plot_nnz_by_position, activity=activity),
        "union": partial(_plot_union, activity=activity),
        "usage": partial(_plot_usage, activity=activity),
    }
    if speedup:
        panels["speedup"] = partial(_plot_speedup, speedup=speedup)
    paths = {directory / f"{name}.png": plot for name, plot in panels.items()}
    for path, plot in paths.items():
        with drawn(path, title=title) as figure:
            plot(figure.subplots())
    return [by_layer, *paths]


def _plot_nnz_by_layer(axes: Axes, activity: Activity) -> None:
    low, p50, p99 = np.percentile(activity.nnz, (1, 50, 99), axis=(1, 2))
    mean, at = activity.nnz.mean(axis=(1, 2)), np.arange(len(activity.nnz))
    bars = axes.barh(at, p99 - low, 0.5, low, alpha=0.4, label="1st-99th percentile")
    axes.vlines(p50, at - 0.25, at + 0.25, color="C0", lw=2.5, label="median")
    axes.plot(mean, at, "o", color="C1", ms=5, label="mean")
    labels = [f"median {m:.0f}, mean {n:.1f}" for m, n in zip(p50, mean, strict=True)]
    label_bars(axes, bars, labels)


def _plot_nnz_by_position(axes: Axes, activity: Activity) -> None:
    length = activity.nnz.shape[2]
    _plot_layer_lines(axes, np.arange(length), activity.nnz.mean(axis=1))
    scale_over_decades(axes, "x", 0, length)
    scale_to_neurons(axes, "y", activity.usage.shape[1])
    axes.set(xlabel="position in the sequence; 0 is the first")
    axes.set_title("mean over the sequences", loc="left", fontsize="medium")


def _plot_union(axes: Axes, activity: Activity) -> None:
    sizes = list(activity.union)
    share = activity.usage / activity.nnz[0].size  # of the tokens for which a neuron is active
    measured = np.stack(list(activity.union.values()), axis=1)
    # If a neuron is active for a share p of the tokens, it is so for at least one of n tokens drawn
    # at random with probability 1 - (1 - p)^n.
    every_size = np.arange(1, sizes[-1] + 1)
    independent = np.stack([1 - np.mean((1 - share) ** n, axis=1) for n in every_size], axis=1)
    _plot_layer_lines(axes, sizes, 100 * measured, "o-")
    for line, y in zip(axes.get_lines(), independent, strict=True):
        axes.plot(every_size, 100 * y, ls=":", lw=1, color=line.get_color())
    axes.set(xlabel="tokens", ylabel="neurons active for any of them (%)", ylim=0)
    axes.set_xscale("log", base=2)
    axes.set_xticks(sizes, map(str, sizes))
    axes.plot([], [], "o-", ms=3, color=QUIET, label="consecutive")
    axes.plot([], [], ":", color=QUIET, label="drawn at random")
    legend_above(axes)


def _plot_usage(axes: Axes, activity: Activity) -> None:
    d_ff = activity.usage.shape[1]
    neurons = 100 * np.arange(1, d_ff + 1) / d_ff
    _plot_layer_lines(axes, neurons, 100 * concentration(activity.usage))
    axes.plot([0, 100], [0, 100], color=QUIET, ls="--", lw=1, label="if all were used equally")
    axes.set(xlabel="most used neurons (%)", ylabel="share of the activations (%)")
    axes.set(xlim=(0, 100), ylim=(0, 101))
    legend_above(axes)


def _plot_speedup(axes: Axes, speedup: Speedup) -> None:
    colors = _layer_colors(axes, len(speedup.nnz))
    axes.scatter(speedup.nnz, speedup.factor, color=colors, zorder=2)
    axes.axhline(1, color=QUIET, ls="--", lw=1)
    axes.set(xlabel="neurons active for a token, mean", ylabel="speed-up over dense XLA")
    title = f"feed-forward block of each layer, {speedup.device}"
    if len(speedup.nnz) > 2 and np.ptp(speedup.nnz) and np.ptp(speedup.factor):
        title += f", r = {np.corrcoef(speedup.nnz, speedup.factor)[0, 1]:.3f}"
    axes.set_title(title, loc="left", fontsize="medium")


def _plot_layer_lines(
    axes: Axes, x: np.typing.ArrayLike, layers: np.ndarray, style: str = "-"
) -> None:
    """Draws a line per layer, coloured by depth."""
    for y, color in zip(layers, _layer_colors(axes, len(layers)), strict=True):
        axes.plot(x, y, style, ms=3, lw=1.2, color=color)


def _layer_colors(axes: Axes, layers: int) -> np.ndarray:
    """The colours of the layers, by depth; a bar beside the panel explains them."""
    calm = ListedColormap(colormaps["viridis"](np.linspace(0.05, 0.85, 256)))
    colors = ScalarMappable(Normalize(0, max(1, layers - 1)), calm)
    axes.figure.colorbar(colors, ax=axes, label="layer", ticks=MaxNLocator(integer=True))
    return colors.to_rgba(np.arange(layers))

"""Plots a record of the study: frontiers of the methods, layers and positions of the variants.

A variant has one colour in all plots: that of its method, darker the stronger it is.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from benchmarks import colors
from benchmarks.study import values
from benchmarks.tables import Row
from twell_jax.plotting import QUIET, over_decades

# What the cross-entropy is plotted over; what the record lacks is left out.
_COSTS: dict[str, Callable[[Row], float]] = {
    "mean non-zeros per token": values.nnz,
    "256 tokens share": values.union,
    "layers' speed-up, forward": values.speedup,
    "layers' speed-up, both passes": values.speedup_in_training,
}
_LEAST_NNZ = 0.01  # below it there is nothing left to compute
_OVER_DECADES = ("mean non-zeros per token", "256 tokens share")


def cross_entropy(figure: Figure, record: dict[str, Any]) -> None:
    """A frontier for each method: means over the seeds, and the runs as small points."""
    groups = values.by_variant(record["rows"])
    known = {label: [g for g in groups if _has(g, cost)] for label, cost in _COSTS.items()}
    known = {label: found for label, found in known.items() if found}
    lines = -(-len(known) // 2)
    figure.set_size_inches(7, 3.5 * lines)
    panels = figure.subplots(lines, 2, sharey=True, squeeze=False).ravel()
    for axes, (label, found) in zip(panels, known.items(), strict=False):
        for name in dict.fromkeys(group["method"] for group in groups):
            of_method = [group for group in found if group["method"] == name]
            _frontier(axes, of_method, _COSTS[label])
        axes.set(xlabel=label)
        if axes.get_subplotspec().is_first_col():
            axes.set(ylabel="held-out CE (nats/token)")
        if label in _OVER_DECADES:
            over_decades(axes, "x")
    for axes in panels[len(known) :]:
        axes.remove()
    _legend(figure, panels[0])


def _has(group: Row, cost: Callable[[Row], float]) -> bool:
    try:
        return all(np.isfinite(cost(run)) for run in group["runs"])
    except KeyError:
        return False


def _frontier(axes: Axes, groups: list[Row], cost: Callable[[Row], float]) -> None:
    """The variants of one method, joined by strength."""
    of_variants, means = _colors(groups), []
    for group in groups:
        color = of_variants[group["variant"]]
        points = [(cost(run), run["held_out_ce"]) for run in group["runs"]]
        means.append(np.mean(points, axis=0))
        if len(points) > 1:
            axes.plot(*np.transpose(points), ".", color=color, alpha=0.5)
        axes.plot(*means[-1], "o", color=color, ms=5, zorder=3, label=group["variant"])
    if len(groups) > 1:
        (color,) = colors.of([groups[0]["method"]]).values()
        axes.plot(*np.transpose(means), color=color, lw=1)


def depth(figure: Figure, record: dict[str, Any]) -> None:
    """The non-zeros of the layers of each variant, means over the seeds."""
    axes, groups = figure.subplots(), values.by_variant(record["rows"])
    of_variants = _colors(groups)
    for group in groups:
        name = group["variant"]
        nnz = np.mean([run["nnz_mean"] for run in group["runs"]], axis=0)
        axes.plot(nnz, "o-", ms=3, lw=1, color=of_variants[name], label=name)
    over_decades(axes, "y")
    least, most = axes.get_ylim()
    axes.set(xlabel="layer", ylabel="mean non-zeros per token", ylim=(max(least, _LEAST_NNZ), most))
    _legend(figure, axes)


def position(figure: Figure, record: dict[str, Any]) -> None:
    """The non-zeros by position in the sequence, means over the layers and the seeds."""
    axes, groups = figure.subplots(), values.by_variant(record["rows"])
    of_variants = _colors(groups)
    for group in groups:
        name = group["variant"]
        start, stop = np.transpose(group["runs"][0]["positions"])
        # The geometric mean of a range's ends; positions count from 1.
        at = np.sqrt((start + 1) * stop)
        nnz = np.mean([run["nnz_by_position"] for run in group["runs"]], axis=(0, 1))
        axes.plot(at, nnz, "o-", ms=3, lw=1, color=of_variants[name], label=name)
    over_decades(axes, "x")
    over_decades(axes, "y")
    axes.set(xlabel="position in the sequence", ylabel="mean non-zeros")
    _legend(figure, axes)


def speedup(figure: Figure, record: dict[str, Any]) -> None:
    """The speed-up of each layer of each run, over its non-zeros and over its union."""
    groups = values.by_variant(record["rows"])
    by_nnz, by_share = panels = figure.subplots(1, 2, sharey=True)
    of_variants = _colors(groups)
    for group in groups:
        nnz, share, factor = values.layers_of(group["runs"]).T
        if factor.size:
            style: dict[str, Any] = {"color": of_variants[group["variant"]], "ms": 4}
            by_nnz.plot(nnz, factor, "o", label=group["variant"], **style)
            by_share.plot(share, factor, "o", **style)
    over_decades(by_nnz, "x")
    by_nnz.set(xlabel="mean nnz", ylabel="speed-up over dense XLA")
    by_share.set(xlabel="256 tokens share", xlim=(-0.03, 1.03), xticks=(0, 0.5, 1))
    for axes in panels:
        axes.axhline(1, color=QUIET, ls="--", lw=1)
        if (r := values.correlations(record["rows"]).get(axes.get_xlabel())) is not None:
            axes.set_title(f"gated variants: r = {r:.3f}", loc="left", fontsize="medium")
    _legend(figure, by_nnz)


def _colors(groups: list[Row]) -> dict[str, str]:
    """The colour of each variant."""
    return colors.of(group["variant"] for group in groups)


def _legend(figure: Figure, axes: Axes) -> None:
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside right upper", frameon=False, fontsize="small")

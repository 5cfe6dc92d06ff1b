"""Figures as PNG files in one style, without a display or a change of matplotlib's settings."""

import contextlib
import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from cycler import cycler
from matplotlib.axes import Axes
from matplotlib.container import BarContainer
from matplotlib.figure import Figure
from matplotlib.scale import SymmetricalLogScale
from matplotlib.ticker import LogLocator, NullFormatter

from twell_jax import untrusted
from twell_jax.config import Config

QUIET = "#8a8f98"  # of lines to compare with

COLORS = [
    "#4477aa", "#cc6677", "#44aa99", "#ddaa33", "#aa4499",
    "#88ccee", "#117733", "#882255", "#999933", "#332288",
]  # fmt: skip

_STYLE: dict[Any, Any] = {
    "axes.prop_cycle": cycler(color=COLORS),
    "axes.edgecolor": QUIET,
    "axes.grid": True,
    "axes.axisbelow": True,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": "#e8eaed",
    "legend.frameon": False,
    "xtick.color": QUIET,
    "xtick.labelcolor": "black",
    "ytick.color": QUIET,
    "ytick.labelcolor": "black",
}


@contextlib.contextmanager
def drawn(
    path: Path, height: float = 4, title: str = "", description: str = ""
) -> Iterator[Figure]:
    """Yields an empty figure; what the block draws on it is then written to `path` as PNG.

    The file is never partly written, also if two processes write it at once. Nothing is written if
    the block raises.

    Args:
      path: the file.
      height: of the figure, in inches of 150 pixels; it is 7 inches wide.
      title: written above all panels, from the left edge on.
      description: what the figure shows, for the file's metadata.
    """
    metadata = {"Description": description} if description else None
    with matplotlib.rc_context(_STYLE):
        figure = Figure(figsize=(7, height), dpi=150, layout="constrained")
        if title:
            figure.suptitle(title, x=0.01, ha="left", fontsize="medium")
        yield figure
        figure.savefig(png := io.BytesIO(), format="png", metadata=metadata)
    temporary = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    temporary.write_bytes(png.getvalue())
    temporary.replace(path)


def title_of_run(directory: Path, config: Config) -> str:
    """Two lines: the name of a run's directory, and its main settings."""
    model, targets = config.model, []
    if config.sparsity_target is not None:
        targets.append(f"target {config.sparsity_target:g} non-zeros")
    if config.union_target is not None:
        targets.append(f"target U {config.union_target:.1%}")
    l1 = ", ".join(targets) or f"L1 {config.l1_coefficient:g}"
    return (
        f"{literal(directory.resolve().name)}\n"
        f"{model.activation}, {l1}, {model.layers} layers of "
        f"{model.d_ff} neurons, d_model {model.d_model}, lr {config.optimizer.lr:g}, "
        f"{config.batch_tokens:,} tokens a step"
    )


def literal(name: str) -> str:
    """A name as text of a figure, where what stands between two "$" would be a formula.

    What cannot be drawn, such as what is no UTF-8, is spelt out.
    """
    return untrusted.plain(name).replace("$", r"\$")


@contextlib.contextmanager
def drawn_by_layer(path: Path, layers: int, d_ff: int, title: str, bars: int = 1) -> Iterator[Axes]:
    """Yields a panel with a row for each layer, from the top down, and its active neurons.

    The block draws horizontal bars, so many for a layer, layer i around y = i; see `drawn` and
    `scale_to_neurons`.
    """
    with drawn(path, height=1.6 + (0.26 + 0.1 * bars) * layers, title=title) as figure:
        axes = figure.subplots()
        scale_to_neurons(axes, "x", d_ff)
        axes.set(ylabel="layer", yticks=range(layers), ylim=(layers - 0.4, -0.6))
        axes.grid(axis="y", visible=False)
        yield axes
        figure.legend(loc="outside lower center", ncols=4, fontsize="small")


def label_bars(axes: Axes, bars: BarContainer, labels: Sequence[str]) -> None:
    """Writes a label at the end of each bar, over any line that is there."""
    box = {"facecolor": "white", "edgecolor": "none", "pad": 0.5}
    axes.bar_label(bars, labels, padding=3, fontsize="small", bbox=box)


def legend_above(axes: Axes) -> None:
    """Adds a legend in one row above a panel, where it hides nothing."""
    axes.legend(
        loc="lower left", bbox_to_anchor=(0, 1), ncols=9, fontsize="small", borderaxespad=0.2
    )


def of_last_part(axes: Axes, since: float) -> None:
    """Makes a panel show the last part of its lines: losses begin far above, where none differ.

    Args:
      axes: a panel with lines.
      since: the share of each line's x axis, which begins at zero, that may be left out.
    """
    data = [np.array(line.get_data(), float) for line in axes.get_lines()]
    known = [points[:, np.isfinite(points[1])] for points in data]
    lines = [points for points in known if points.size]
    if not lines:
        return
    shown = np.concatenate([y[at >= since * at.max()] for at, y in lines])
    margin = 0.05 * (np.ptp(shown) or 1)
    least, most = shown.min() - margin, shown.max() + margin
    start = min(at[y <= most].min() for at, y in lines)
    end = max(at.max() for at, _ in lines)
    wider = 0.02 * (end - start) or 0.5  # of a single point
    axes.set(ylim=(least, most), xlim=(start - wider, end + wider))


def over_decades(axes: Axes, direction: str) -> None:
    """Makes one axis ("x" or "y") of a drawn panel logarithmic, with plain numbers that fit.

    If what is drawn spans less than half a decade, the axis stays linear.
    """
    limits = axes.dataLim.intervalx if direction == "x" else axes.dataLim.intervaly
    positive = axes.dataLim.minposx if direction == "x" else axes.dataLim.minposy
    least, most = max(limits[0], positive), limits[1]
    if not (0 < least < most < np.inf) or most / least < 10**0.5:
        return
    axes.set(**{f"{direction}scale": "log"})
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_major_locator(LogLocator(subs=(1,) if most / least > 50 else (1, 2, 5), numticks=5))
    axis.set_major_formatter("{x:g}")
    axis.set_minor_formatter(NullFormatter())


def scale_to_neurons(axes: Axes, direction: str, d_ff: int) -> None:
    """Makes one axis ("x" or "y") count the active neurons of a token; a line marks all `d_ff`.

    It goes from zero on, as bars do. That of lines that are drawn already ("y") begins with the
    power of ten below them.
    """
    least = axes.dataLim.y0 if direction == "y" and axes.has_data() else 0
    start = 10 ** int(np.log10(least)) if 1 <= least < np.inf else 0
    scale_over_decades(axes, direction, start, 1.5 * d_ff)
    axes.set(**{f"{direction}label": f"neurons of {d_ff} active for a token"})
    mark = axes.axvline if direction == "x" else axes.axhline
    mark(d_ff, color=QUIET, ls="--", lw=1, label="all neurons")


def scale_over_decades(axes: Axes, direction: str, start: int, end: float) -> None:
    """Makes one axis ("x" or "y") go from `start` to `end`, linearly up to 1, then by decades.

    `start` is zero or a power of ten.
    """
    decades = [10**exponent for exponent in range(len(str(int(end))))]
    steps = (1, 2, 5) if start > 0 and end < 100 * start else (1,)
    ticks = [0, *(step * decade for decade in decades for step in steps)]
    ticks = [tick for tick in ticks if start <= tick <= end]
    axes.set(
        **{
            f"{direction}scale": SymmetricalLogScale(None, linthresh=1),
            f"{direction}lim": (start, end),
        }
    )
    axis = axes.xaxis if direction == "x" else axes.yaxis
    axis.set_ticks(ticks, list(map(str, ticks)))
    axis.set_ticks([], minor=True)

"""Draws the figure of the first page: how much faster whole models are than dense ones."""

from matplotlib.figure import Figure

from benchmarks import colors
from benchmarks.figures import FIGURES
from benchmarks.quotes import Records
from twell_jax.plotting import label_bars

# A bar for each of these figures, from the top down.
BARS = {
    "scoring-2b": "score text",
    "step-2b": "train",
    "decode-h100-1": "decode one sequence",
}


def labels(records: Records) -> list[str]:
    """What stands at the bars."""
    return [f"{FIGURES[name].text(records)}x" for name in BARS]


def description(records: Records) -> str:
    """The figure in words, which the file holds, too."""
    parts = [f"{work} {label}" for work, label in zip(BARS.values(), labels(records), strict=True)]
    return ", ".join(parts)


def draw(figure: Figure, records: Records) -> None:
    """Bars over the dense model, from zero on, as their lengths are compared."""
    figure.set_size_inches(5, 2)  # so that a phone shows letters that can be read
    axes = figure.subplots()
    (color,) = colors.of(["sparse"]).values()
    factors = [FIGURES[name].number(records) for name in BARS]
    bars = axes.barh(list(BARS.values()), factors, height=0.6, color=color)
    label_bars(axes, bars, labels(records))
    axes.axvline(1, color="black", ls="--", lw=1)
    axes.grid(axis="y", visible=False)
    axes.set(xlim=(0, 1.15 * max(factors)), ylim=(len(BARS) - 0.5, -0.5))
    axes.set_xlabel("times as fast as dense: 2B, one H100")

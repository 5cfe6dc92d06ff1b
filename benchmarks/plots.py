"""Plots records: the block's speed-up, losses of one run computed in several ways, time."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.tables import Row, block


def of_largest(rows: list[Row]) -> list[Row]:
    """Those of the largest M that `speedup` draws."""
    m = max((row["m"] for row in rows), default=0)
    gated = any(row["gated"] for row in rows)
    return [
        row
        for row in rows
        if row["m"] == m
        and row["gated"] == gated
        and not row["heavy_rows"]
        and not row.get("pruned")
        and "speedup" in row
    ]


def has_lines(rows: list[Row]) -> bool:
    """Whether `speedup` can draw a line, of more than one nnz."""
    return len({row["nnz_mean"] for row in of_largest(rows)}) > 1


def speedup(figure: Figure, record: dict[str, Any]) -> None:
    """The kernels' speed-up by nnz at the largest M, a line per packing and pattern."""
    axes = figure.subplots()
    rows = of_largest(record["rows"])
    names = dict.fromkeys(map(block, rows))
    kernels = [name for name in names if name.split(",")[0] not in ("xla", "tokamax", "torch")]
    for index, name in enumerate(kernels):
        for pattern, style in (("skewed", "o-"), ("uniform", "s--"), ("recorded", "^:")):
            line = sorted(
                (row["nnz_mean"], row["speedup"])
                for row in rows
                if (block(row), row["pattern"]) == (name, pattern)
            )
            if line:
                label = f"{name}, {pattern}"
                axes.plot(*zip(*line, strict=True), style, color=f"C{index}", ms=4, label=label)
    axes.axhline(1, color="gray", lw=1)
    axes.set(
        xscale="log",
        ylim=(0, None),
        xlabel="mean non-zeros per token",
        ylabel="speed-up over jitted dense XLA",
        title=f"forward, M = {rows[0]['m']}, {record['device']}, {record['date']}",
    )
    axes.legend(frameon=False, ncols=2)


def losses(figure: Figure, record: dict[str, Any]) -> None:
    """The variants' losses, their differences from the first, and where gradients were sparse."""
    figure.set_size_inches(7, 8)
    loss, difference, sparse = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    for row in record["rows"]:
        at, smooth = row["step"], row["difference"]
        loss.plot(at, row["ce"], lw=1, label=row["variant"])
        difference.plot(at[-len(smooth) :], smooth, lw=1)
        sparse.plot(at, 100 * sparse_share(row), lw=1)
    loss.set(ylabel="cross-entropy (nats/token)", title=f"{record['device']}, {record['date']}")
    figure.legend(loc="outside upper center", ncols=2, frameon=False)
    dense = record["rows"][0]["variant"]
    difference.set_ylabel(f"minus {dense!r}, mean of {record['window']} logged steps")
    sparse.set(xlabel="step", ylabel="sparse\ngradients (%)", ylim=(-5, 105))


def wallclock(figure: Figure, record: dict[str, Any]) -> None:
    """Held-out cross-entropy over time and energy, and the pace over time, pauses and all."""
    rows = record["rows"]
    clocks = {"seconds": 1, "joules": 1e-3}
    known = [clock for clock in clocks if all(clock in row["evaluated"] for row in rows)]
    figure.set_size_inches(7, 7)
    panels = figure.subplot_mosaic([known, ["pace"] * len(known)], height_ratios=(2, 1))
    for row in rows:
        evaluated, logged = row["evaluated"], row["logged"]
        for clock in known:
            at = clocks[clock] * np.array(evaluated[clock])
            panels[clock].plot(at, evaluated["held_out_ce"], "o-", ms=3, lw=1, label=row["variant"])
        steps = np.diff([0, *logged["step"]])
        tokens = steps * row["tokens"] / row["steps"]
        rates = tokens / np.diff([0, *logged["seconds"]])
        panels["pace"].step(logged["seconds"], rates / 1e3, lw=1)
    for clock in known:
        if "equal_ce" in rows[0]:
            panels[clock].axhline(rows[0]["equal_ce"], color="gray", lw=1, ls="--")
        # The first evaluations are far above the others, which shall be told apart.
        later = [ce for row in rows for ce in row["evaluated"]["held_out_ce"][1:]]
        panels[clock].set(xlim=(0, None), ylim=(None, 1.02 * max(later) if later else None))
    panels["seconds"].set(xlabel="seconds of training", ylabel="held-out CE (nats/token)")
    if "joules" in known:
        panels["joules"].set(xlabel="energy of the GPU (kJ)")
    panels["pace"].set(xlabel="seconds of training", ylabel="1000 tokens/s, with pauses")
    panels["pace"].set(xlim=(0, None), ylim=(0, None))
    panels["seconds"].set_title(f"{record['device']}, {record['date']}", loc="left")
    handles, labels = panels["seconds"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3, frameon=False)


def sparse_share(row: Row) -> np.ndarray:
    """The share of the layers' gradients that were sparse, at each logged step."""
    return np.mean(np.array(row["chosen"]) * (1 - np.array(row["overflow"])), axis=1)

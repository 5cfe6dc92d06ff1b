"""Plots records: the block's speed-up, losses of one run computed in several ways, time."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks import colors
from benchmarks.tables import Row, block, grouped
from twell_jax.plotting import QUIET, of_last_part, over_decades


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
    """Whether `speedup` can draw a line, of one block and pattern with more than one nnz."""
    lines = grouped(of_largest(rows), lambda row: (block(row), row["pattern"]))
    return any(len({row["nnz_mean"] for row in line}) > 1 for line in lines)


def speedup(figure: Figure, record: dict[str, Any]) -> None:
    """The kernels' speed-up by nnz at the largest M, a line per packing and pattern."""
    axes = figure.subplots()
    rows = of_largest(record["rows"])
    names = dict.fromkeys(map(block, rows))
    kernels = [name for name in names if name.split(",")[0] not in ("xla", "tokamax", "torch")]
    of_kernels = colors.of(kernels)
    for name in kernels:
        for pattern, style in (("skewed", "o-"), ("uniform", "s--"), ("recorded", "^:")):
            line = sorted(
                (row["nnz_mean"], row["speedup"])
                for row in rows
                if (block(row), row["pattern"]) == (name, pattern)
            )
            if line:
                label = f"{name}, {pattern}"
                axes.plot(
                    *zip(*line, strict=True), style, color=of_kernels[name], ms=4, label=label
                )
    axes.axhline(1, color=QUIET, ls="--", lw=1)
    over_decades(axes, "x")
    axes.set(
        xlabel="mean non-zeros per token",
        ylabel="speed-up over jitted dense XLA",
        title=f"forward, M = {rows[0]['m']}, {record['device']}, {record['date']}",
    )
    figure.legend(loc="outside lower center", ncols=3, fontsize="small")


def losses(figure: Figure, record: dict[str, Any]) -> None:
    """The variants' losses, their differences from the first, and where gradients were sparse."""
    figure.set_size_inches(7, 8)
    loss, difference, sparse = figure.subplots(3, 1, sharex=True, height_ratios=(3, 3, 1))
    of_variants = colors.of(row["variant"] for row in record["rows"])
    for row in record["rows"]:
        at, smooth = row["step"], row["difference"]
        style: dict[str, Any] = {"lw": 1, "color": of_variants[row["variant"]]}
        loss.plot(at, row["ce"], label=row["variant"], **style)
        difference.plot(at[-len(smooth) :], smooth, **style)
        sparse.plot(at, 100 * sparse_share(row), **style)
    of_last_part(loss, since=0.1)
    loss.set(ylabel="cross-entropy (nats/token)", title=f"{record['device']}, {record['date']}")
    figure.legend(loc="outside upper center", ncols=2)
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
    of_variants = colors.of(row["variant"] for row in rows)
    for row in rows:
        evaluated, logged = row["evaluated"], row["logged"]
        style: dict[str, Any] = {"lw": 1, "color": of_variants[row["variant"]]}
        for clock in known:
            at = clocks[clock] * np.array(evaluated[clock])
            ce = evaluated["held_out_ce"]
            panels[clock].plot(at, ce, "o-", ms=3, label=row["variant"], **style)
        steps = np.diff([0, *logged["step"]])
        tokens = steps * row["tokens"] / row["steps"]
        rates = tokens / np.diff([0, *logged["seconds"]])
        panels["pace"].step(logged["seconds"], rates / 1e3, **style)
    for clock in known:
        of_last_part(panels[clock], since=0.65)
    shown = [panels[clock].get_ylim() for clock in known]
    for clock in known:
        panels[clock].set_ylim(min(map(min, shown)), max(map(max, shown)))
        if "equal_ce" in rows[0]:
            panels[clock].axhline(rows[0]["equal_ce"], color=QUIET, lw=1, ls="--")
    panels["seconds"].set(xlabel="seconds of training", ylabel="held-out CE (nats/token)")
    if "joules" in known:
        panels["joules"].set(xlabel="energy of the GPU (kJ)")
    panels["pace"].set(xlabel="seconds of training", ylabel="1000 tokens/s, with pauses")
    panels["pace"].set(xlim=(0, None), ylim=(0, None))
    panels["seconds"].set_title(f"{record['device']}, {record['date']}", loc="left")
    handles, labels = panels["seconds"].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside upper center", ncols=3)


def sparse_share(row: Row) -> np.ndarray:
    """The share of the layers' gradients that were sparse, at each logged step."""
    return np.mean(np.array(row["chosen"]) * (1 - np.array(row["overflow"])), axis=1)

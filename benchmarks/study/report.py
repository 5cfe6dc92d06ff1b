"""Shows a record of the study, for `benchmarks.render`: a table, correlations and four plots."""

from typing import Any

import numpy as np
from matplotlib.figure import Figure

from benchmarks.tables import Row, Table, number


def in_order(rows: list[Row]) -> list[Row]:
    """The variants by increasing L1 coefficient."""
    return sorted(rows, key=l1_coefficient)


def describe_correlations(rows: list[Row]) -> str:
    """A list of the correlations over all gated variants and over each; empty if there are none."""
    cases = [("all gated", rows), *((row["variant"], [row]) for row in in_order(rows))]
    lines = [
        f"- {name}: " + ", ".join(f"{r:.3f} with {x}" for x, r in found.items())
        for name, selected in cases
        if (found := correlations(selected))
    ]
    return "\n".join(["Correlations of the layers' speed-ups:", "", *lines]) if lines else ""


def l1_coefficient(row: Row) -> float:
    """The coefficient with which the variant was trained; later settings override earlier ones."""
    return float(dict(s.split("=", 1) for s in row["settings"]).get("l1_coefficient", 0))


def correlations(rows: list[Row]) -> dict[str, float]:
    """Pearson's r between speed-up and what it may depend on, over all layers of gated variants.

    Variants without a gate are left out, because another share of their time depends on sparsity.
    The result is empty if there are fewer than three layers.
    """
    layers = [
        layer
        for row in rows
        if row["speedup"] and "model.gated=false" not in row["settings"]
        for layer in zip(
            row["speedup"]["nnz"], row["union"]["256"], row["speedup"]["factor"], strict=True
        )
    ]
    if len(layers) < 3:
        return {}
    r_nnz, r_share, _ = np.corrcoef(layers, rowvar=False)[-1]
    return {"mean nnz": float(r_nnz), "256 tokens share": float(r_share)}


def _plot_cross_entropy(figure: Figure, record: dict[str, Any]) -> None:
    rows = in_order(record["rows"])
    axes = figure.subplots()
    for row in rows:
        point = np.mean(row["nnz_mean"]), row["held_out_ce"]
        axes.plot(*point, "o", color="C0", ms=5)
        axes.annotate(
            row["variant"], point, xytext=(5, 3), textcoords="offset points", fontsize="small"
        )
    axes.set(xscale="log", xlabel="mean non-zeros per token", ylabel="held-out CE (nats/token)")
    axes.margins(x=0.2)


def _plot_depth(figure: Figure, record: dict[str, Any]) -> None:
    rows = in_order(record["rows"])
    axes = figure.subplots()
    for row in rows:
        axes.plot(row["nnz_mean"], "o-", ms=3, lw=1, label=row["variant"])
    axes.set(yscale="log", xlabel="layer", ylabel="mean non-zeros per token")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")


def _plot_position(figure: Figure, record: dict[str, Any]) -> None:
    rows = in_order(record["rows"])
    axes = figure.subplots()
    for row in rows:
        start, stop = np.transpose(row["positions"])
        # The geometric mean of a range's ends; positions count from 1.
        at, nnz = np.sqrt((start + 1) * stop), np.mean(row["nnz_by_position"], axis=0)
        axes.plot(at, nnz, "o-", ms=3, lw=1, label=row["variant"])
    axes.set(xscale="log", yscale="log", xlabel="position in the sequence", ylabel="mean non-zeros")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")


def _plot_speedup(figure: Figure, record: dict[str, Any]) -> None:
    rows = in_order(record["rows"])
    by_nnz, by_share = panels = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(rows):  # the same colours as in the other plots
        if speedup := row["speedup"]:
            style = {"color": f"C{i}", "ms": 4, "label": row["variant"]}
            by_nnz.plot(speedup["nnz"], speedup["factor"], "o", **style)
            by_share.plot(row["union"]["256"], speedup["factor"], "o", **style)
    by_nnz.set(xscale="log", xlabel="mean nnz", ylabel="speed-up over dense XLA")
    by_share.set(xlabel="256 tokens share")
    for axes in panels:
        axes.axhline(1, color="gray", ls="--", lw=1)
        if (r := correlations(rows).get(axes.get_xlabel())) is not None:
            axes.set_title(f"gated variants: r = {r:.3f}", loc="left", fontsize="medium")
    figure.legend(
        *by_nnz.get_legend_handles_labels(),
        loc="outside right upper",
        frameon=False,
        fontsize="small",
    )


def _speedup(row: Row) -> dict[str, list[float]]:
    return row["speedup"] or {}  # None where it was not measured


TABLE = Table(
    title="What L1 does to a small model",
    about="Ten variants of a model of 120M parameters, each trained for 1000 steps; "
    "[the page of the study](../study.md) says how. Means are over the layers, times are sums over "
    "them.",
    columns={
        "variant": number("variant", "{}"),
        "held-out CE": number("held_out_ce", "{:.3f}"),
        "nnz": lambda row: f"{np.mean(row['nnz_mean']):.1f}",
        "of H": number("d_ff", "{}"),
        "zeros": lambda row: f"{np.mean(row['sparsity']):.1%}",
        "dead": lambda row: f"{np.mean(row['dead']) / row['d_ff']:.1%}",
        "first token": lambda row: f"{np.array(row['nnz_by_position'])[:, 0].mean():.0f}",
        "256 tokens share": lambda row: f"{np.mean(row['union']['256']):.1%}",
        "XLA, ms": lambda row: f"{sum(_speedup(row)['xla_ms']):.2f}",
        "kernels, ms": lambda row: f"{sum(_speedup(row)['mosaic_ms']):.2f}",
        "speed-up": lambda row: (
            f"{sum(_speedup(row)['xla_ms']) / sum(_speedup(row)['mosaic_ms']):.2f}x"
        ),
    },
    order=in_order,
    notes=describe_correlations,
    plots={
        "-cross-entropy": _plot_cross_entropy,
        "-depth": _plot_depth,
        "-position": _plot_position,
        "-speedup": _plot_speedup,
    },
)

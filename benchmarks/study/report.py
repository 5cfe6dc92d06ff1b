"""Makes the table and the four plots of docs/study.md from a record of benchmarks.study.

python -m benchmarks.study.report benchmarks/results/study-....json [--plots docs]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

from benchmarks.render import markdown


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--plots", type=Path, help="directory for the plots")
    args = parser.parse_args()
    rows = sorted(json.loads(args.record.read_text())["rows"], key=l1_coefficient)
    print(table(rows))
    print("\ncorrelations of the layers' speed-ups:")
    for name, of in [("all gated", rows), *((row["variant"], [row]) for row in rows)]:
        if found := correlations(of):
            print(f"{name}: " + ", ".join(f"{r:.3f} with {x}" for x, r in found.items()))
    if args.plots:
        for path in plots(rows, args.plots):
            print(path)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per variant; the times are sums over the layers."""
    titles = ["variant", "held-out CE", "nnz", "of H", "zeros", "dead", "first token",
              "256 tokens share", "XLA, ms", "kernels, ms", "speed-up"]  # fmt: skip
    lines = []
    for row in rows:
        d_ff, nnz = row["d_ff"], np.mean(row["nnz_mean"])
        first = np.array(row["nnz_by_position"])[:, 0].mean()
        cells = [
            row["variant"],
            f"{row['held_out_ce']:.3f}",
            f"{nnz:.1f}",
            str(d_ff),
            f"{np.mean(row['sparsity']):.1%}",
            f"{np.mean(row['dead']) / d_ff:.1%}",
            f"{first:.0f}",
            f"{np.mean(row['union']['256']):.1%}",
        ]
        if speedup := row["speedup"]:
            xla, ours = sum(speedup["xla_ms"]), sum(speedup["mosaic_ms"])
            cells += [f"{xla:.2f}", f"{ours:.2f}", f"{xla / ours:.2f}x"]
        else:
            cells += 3 * ["-"]
        lines.append(cells)
    return markdown(titles, lines)


def l1_coefficient(row: dict[str, Any]) -> float:
    """The coefficient that the variant was trained with; its last setting counts."""
    return float(dict(s.split("=", 1) for s in row["settings"]).get("l1_coefficient", 0))


def correlations(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Pearson's r between speed-up and what it may depend on, over all layers of gated variants.

    Variants without a gate are left out: they spend another share of their time on the non-zeros.
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
    of_nnz, of_share, _ = np.corrcoef(layers, rowvar=False)[-1]
    return {"mean nnz": float(of_nnz), "256 tokens share": float(of_share)}


def plots(rows: list[dict[str, Any]], directory: Path) -> list[Path]:
    """Cross-entropy over nnz, nnz over depth and position, layers' speed-ups over nnz and union."""
    figures = {
        "study-cross-entropy": _plot_cross_entropy,
        "study-depth": _plot_depth,
        "study-position": _plot_position,
        "study-speedup": _plot_speedup,
    }
    paths = []
    for name, draw in figures.items():
        figure = plt.figure(figsize=(9, 4.5), layout="constrained")
        draw(figure, rows)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=120)
        plt.close(figure)
    return paths


def _plot_cross_entropy(figure: plt.Figure, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row in rows:
        point = np.mean(row["nnz_mean"]), row["held_out_ce"]
        axes.plot(*point, "o", color="C0", ms=5)
        axes.annotate(
            row["variant"], point, xytext=(5, 3), textcoords="offset points", fontsize="small"
        )
    axes.set(xscale="log", xlabel="mean non-zeros per token", ylabel="held-out CE (nats/token)")
    axes.margins(x=0.2)


def _plot_depth(figure: plt.Figure, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row in rows:
        axes.plot(row["nnz_mean"], "o-", ms=3, lw=1, label=row["variant"])
    axes.set(yscale="log", xlabel="layer", ylabel="mean non-zeros per token")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")


def _plot_position(figure: plt.Figure, rows: list[dict[str, Any]]) -> None:
    axes = figure.subplots()
    for row in rows:
        start, stop = np.transpose(row["positions"])
        # The geometric middle of a range of positions, counted from 1.
        at, nnz = np.sqrt((start + 1) * stop), np.mean(row["nnz_by_position"], axis=0)
        axes.plot(at, nnz, "o-", ms=3, lw=1, label=row["variant"])
    axes.set(xscale="log", yscale="log", xlabel="position in the sequence", ylabel="mean non-zeros")
    figure.legend(loc="outside right upper", frameon=False, fontsize="small")


def _plot_speedup(figure: plt.Figure, rows: list[dict[str, Any]]) -> None:
    by_nnz, by_share = panels = figure.subplots(1, 2, sharey=True)
    for i, row in enumerate(rows):  # the colours are those of the other plots
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


if __name__ == "__main__":
    main()

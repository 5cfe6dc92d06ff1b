"""Turns a record of benchmarks.study into what docs/study.md shows: a table and three plots.

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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--plots", type=Path, help="directory for the plots")
    args = parser.parse_args()
    rows = json.loads(args.record.read_text())["rows"]
    print(table(rows))
    if args.plots:
        for path in plots(rows, args.plots):
            print(path)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per variant; the times are sums over the layers."""
    lines = [
        "| variant | held-out CE | nnz | of H | zeros | dead | first token | 256 tokens share "
        "| XLA, ms | kernels, ms | speed-up |",
        "|---" * 11 + "|",
    ]
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
        lines.append("| " + " | ".join(cells) + " |")
    return "\n".join(lines)


def plots(rows: list[dict[str, Any]], directory: Path) -> list[Path]:
    """Cross-entropy over nnz, nnz over depth, and each layer's speed-up over its nnz."""
    figures = {
        "study-cross-entropy": _plot_cross_entropy,
        "study-depth": _plot_depth,
        "study-speedup": _plot_speedup,
    }
    paths = []
    for name, draw in figures.items():
        figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
        draw(axes, rows)
        paths.append(directory / f"{name}.png")
        figure.savefig(paths[-1], dpi=150)
        plt.close(figure)
    return paths


def _plot_cross_entropy(axes, rows):
    for row in rows:
        point = np.mean(row["nnz_mean"]), row["held_out_ce"]
        axes.plot(*point, "o", color="C0", ms=5)
        axes.annotate(
            row["variant"], point, xytext=(5, 3), textcoords="offset points", fontsize="small"
        )
    axes.set(xscale="log", xlabel="mean non-zeros per token", ylabel="held-out CE (nats/token)")
    axes.margins(x=0.2)


def _plot_depth(axes, rows):
    for row in rows:
        axes.plot(row["nnz_mean"], "o-", ms=3, lw=1, label=row["variant"])
    axes.set(yscale="log", xlabel="layer", ylabel="mean non-zeros per token")
    axes.legend(frameon=False, fontsize="small", ncols=2)


def _plot_speedup(axes, rows):
    measured = [row for row in rows if row["speedup"]]
    for row in measured:
        axes.plot(row["speedup"]["nnz"], row["speedup"]["factor"], "o", ms=4, label=row["variant"])
    axes.axhline(1, color="gray", ls="--", lw=1)
    axes.set(xscale="log", xlabel="mean non-zeros per token", ylabel="speed-up over dense XLA")
    if measured:
        axes.legend(frameon=False, fontsize="small", ncols=2)


if __name__ == "__main__":
    main()

"""Turns the record of a benchmark into what docs/performance.md shows.

python -m benchmarks.render benchmarks/results/inference-....json
python -m benchmarks.render benchmarks/results/ffn-....json [--plot docs/ffn.png]
"""

import argparse
import json
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

COLUMNS = {  # of a case, and how they are shown
    "m": ("M", str),
    "pattern": ("pattern", str),
    "superposed": ("copies", str),
    "gated": ("gated", lambda gated: "yes" if gated else "no"),
    "pruned": ("pruned", lambda dead: f"{dead:.0%}" if dead else "-"),
    "nnz_mean": ("mean nnz", "{:.1f}".format),
    "heavy_rows": ("dense rows", str),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("record", type=Path)
    parser.add_argument("--plot", type=Path, help="where to draw ffn or losses, a PNG")
    args = parser.parse_args()
    record = json.loads(args.record.read_text())
    render = {
        "ffn": table,
        "gradients": gradient_table,
        "inference": model_table,
        "losses": loss_table,
        "training": training_table,
    }
    if record["benchmark"] not in render:
        parser.error(f"renders {', '.join(render)}; this record is of {record['benchmark']}")
    print(render[record["benchmark"]](record["rows"]))
    if args.plot:
        {"ffn": plot, "losses": plot_losses}[record["benchmark"]](record, args.plot)


def table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per case: the baseline's time, and time and speed-up of the others."""
    cases: dict[tuple, dict[str, dict[str, Any]]] = {}
    for row in rows:
        cases.setdefault(tuple(row[c] for c in COLUMNS), {})[row["implementation"]] = row
    names = list(dict.fromkeys(row["implementation"] for row in rows))
    lines = []
    for case, measured in cases.items():
        errors = " / ".join(f"{row['error']:.1e}" for row in measured.values() if "error" in row)
        cells = [show(value) for (_, show), value in zip(COLUMNS.values(), case, strict=True)]
        cells += [_cell(measured.get(name)) for name in names]
        lines.append([*cells, errors])
    return markdown([*(title for title, _ in COLUMNS.values()), *names, "error"], lines)


def markdown(titles: list[str], lines: list[list[str]]) -> str:
    """A table."""
    cells = ["| " + " | ".join(line) + " |" for line in (titles, *lines)]
    return "\n".join([cells[0], "|---" * len(titles) + "|", *cells[1:]])


def gradient_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per case and implementation, in brackets against dense XLA."""
    titles = ["pattern", "gated", "mean nnz", "dense rows", "block", "room", "forward and backward",
              "train.py takes", "kept", "peak", "error"]  # fmt: skip
    lines = [
        [
            row["pattern"],
            "yes" if row["gated"] else "no",
            f"{row['nnz_mean']:.1f}",
            str(row["heavy_rows"]),
            row["implementation"],
            str(row.get("gradient_capacity", "-")),
            _cell(row),
            row.get("chosen", "-"),
            f"{row['kept_bytes'] / 1e9:.2f} GB",
            f"{row['peak_bytes'] / 1e9:.2f} GB",
            f"{max(row['errors']):.1e}",
        ]
        for row in rows
    ]
    return markdown(titles, lines)


def model_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per case and implementation, in brackets against the fastest dense one."""
    titles = ["model", "direction", "sequences", "mean nnz", "block", "tokens/s", "mJ/token",
              "peak memory", "error"]  # fmt: skip
    lines = []
    for row in rows:
        speed = energy = memory = "-"
        error = f"{row['error']:.1e}" if "error" in row else "-"
        if "ms" in row:
            speed = f"{row['tokens_per_second']:,.0f} ({row['speedup']:.2f}x)"
            memory = f"{row['peak_bytes'] / 2**30:.1f} GiB"
        if "energy" in row:
            energy = f"{row['joules_per_token'] * 1e3:,.2f} ({row['energy']:.2f}x)"
        sequences, nnz = f"{row['batch']} x {row['context']}", f"{row['nnz_mean']:.1f}"
        case = [row["model"], row["direction"], sequences, nnz, row["implementation"]]
        lines.append([*case, speed, energy, memory, error])
    return markdown(titles, lines)


def loss_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per variant; differences are those to the first one's training CE."""
    titles = ["variant", "held-out CE", "mean difference", "largest", "last nnz by layer",
              "sparse gradients, last", "over the run"]  # fmt: skip
    lines = []
    for row in rows:
        share = sparse_share(row)
        numbers = row["held_out_ce"], row["mean_difference"], row["largest_difference"]
        nnz = ", ".join(f"{layer:.0f}" for layer in row["nnz"][-1])
        shares = f"{share[-1]:.0%}", f"{share.mean():.0%}"
        lines.append([row["variant"], *(f"{number:.4f}" for number in numbers), nnz, *shares])
    return markdown(titles, lines)


def sparse_share(row: dict[str, Any]) -> np.ndarray:
    """Of all gradients of the layers, at each logged step."""
    return np.mean(np.array(row["chosen"]) * (1 - np.array(row["overflow"])), axis=1)


def training_table(rows: list[dict[str, Any]]) -> str:
    """Markdown, a line per mesh and implementation, in brackets the efficiency."""
    columns = {
        "micro_batch": "{}",
        "batch_tokens": "{:,}",
        "sparse_layers": "{}",
        "tokens_per_second": "{:,.0f}",
        "ms": "{:.1f}",
        "collective_ms": "{:.1f}",
        "exposed_ms": "{:.1f}",
        "estimate_ms": "{:.1f}",
        "estimate_collective_ms": "{:.1f}",
    }
    titles = ["model", "block", "data x fsdp", "micro-batch", "tokens a step", "sparse layers",
              "tokens/s", "ms", "collectives", "exposed", "estimate", "its collectives",
              "peak memory"]  # fmt: skip
    lines = []
    for row in rows:
        cells = {name: f.format(row[name]) if name in row else "-" for name, f in columns.items()}
        if "efficiency" in row:
            cells["tokens_per_second"] += f" ({row['efficiency']:.0%})".replace("%", " %")
        memory = f"{row['peak_bytes'] / 2**30:.1f} GiB" if "peak_bytes" in row else "-"
        mesh = f"{row['devices'] // row['fsdp']} x {row['fsdp']}"
        lines.append([row["config"], row["implementation"], mesh, *cells.values(), memory])
    return markdown(titles, lines)


def plot(record: dict[str, Any], path: Path) -> None:
    """Speed-up of our implementations over nnz at the largest M; skewed solid, uniform dashed."""
    figure, axes = plt.subplots(figsize=(7, 4.5), layout="constrained")
    m = max(row["m"] for row in record["rows"])
    for index, name in enumerate(("mosaic", "twell", "unions")):
        for pattern, style in (("skewed", "o-"), ("uniform", "s--")):
            line = sorted(
                (row["nnz_mean"], row["speedup"])
                for row in record["rows"]
                if (row["m"], row["implementation"], row["pattern"]) == (m, name, pattern)
                and row["gated"]
                and not row["heavy_rows"]
                and not row["pruned"]
                and "speedup" in row
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
        title=f"M = {m}, {record['device']}, {record['date']}",
    )
    axes.legend(frameon=False, ncols=2)
    figure.savefig(path, dpi=150)


def plot_losses(record: dict[str, Any], path: Path) -> None:
    """The variants' losses, their differences to the first, and where gradients were sparse."""
    figure, (loss, difference, sparse) = plt.subplots(
        3, 1, figsize=(7, 8), sharex=True, layout="constrained", height_ratios=(3, 3, 1)
    )
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
    figure.savefig(path, dpi=150)


def _cell(row: dict[str, Any] | None) -> str:
    if row is None or "failed" in row:
        return "-"
    return f"{row['ms']:.3f} ms ({row['speedup']:.2f}x)"


if __name__ == "__main__":
    main()

"""Plots a run's training from the records of `metrics.jsonl`, as PNG."""

from pathlib import Path
from typing import Any

import numpy as np

from twell_jax.plotting import plt, save


def plot_run(
    records: list[dict[str, Any]], d_ff: int, unigram_ce: float, directory: Path
) -> list[Path]:
    """Draws `training.png` (loss and sparsity over steps) and `layers.png` (nnz per layer)."""
    steps = [record for record in records if "ce" in record]
    evaluations = [record for record in records if "held_out_ce" in record]
    return [
        _plot_training(steps, evaluations, d_ff, unigram_ce, directory / "training.png"),
        _plot_layers(steps[-1], d_ff, directory / "layers.png"),
    ]


def _plot_training(
    steps: list[dict[str, Any]],
    evaluations: list[dict[str, Any]],
    d_ff: int,
    unigram_ce: float,
    path: Path,
) -> Path:
    at = [record["step"] for record in steps]
    figure, (loss, sparsity) = plt.subplots(2, 1, figsize=(7, 6), sharex=True, layout="constrained")
    loss.plot(at, [record["ce"] for record in steps], lw=1, label="training")
    at_evaluation = [record["step"] for record in evaluations]
    held_out = [record["held_out_ce"] for record in evaluations]
    loss.plot(at_evaluation, held_out, "o-", ms=3, label="held-out")
    loss.axhline(unigram_ce, color="gray", ls="--", lw=1, label="unigram baseline")
    loss.set_ylabel("cross-entropy (nats/token)")
    loss.legend(frameon=False)

    share = 100 * (1 - np.array([record["nnz"] for record in steps]) / d_ff)
    sparsity.fill_between(at, share.min(1), share.max(1), alpha=0.2, lw=0, label="layers, range")
    sparsity.plot(at, share.mean(1), label="layers, mean")
    sparsity.set(xlabel="step", ylabel="zeros among hidden activations (%)", ylim=(None, 100))
    sparsity.legend(frameon=False, loc="lower right")
    return save(figure, path)


def _plot_layers(record: dict[str, Any], d_ff: int, path: Path) -> Path:
    layers = np.arange(len(record["nnz"]))
    figure, axes = plt.subplots(figsize=(6, 3.5), layout="constrained")
    axes.bar(layers - 0.2, record["nnz"], 0.4, label="mean")
    axes.bar(layers + 0.2, record["max_nnz"], 0.4, label="max", alpha=0.5)
    axes.axhline(d_ff, color="gray", ls="--", lw=1, label="dense")
    axes.set(
        yscale="symlog", xlabel="layer", ylabel="non-zero activations per token", xticks=layers
    )
    axes.set_title(f"step {record['step']}", loc="left", fontsize="medium")
    figure.legend(loc="outside upper right", ncols=3, frameon=False)
    return save(figure, path)

"""What is read off the rows of a study's record, and how rows of one variant are put together.

Old records have one row for each variant, without a seed, a method, questions or times of training.
"""

from typing import Any

import numpy as np

from benchmarks.study.runs import METHODS
from benchmarks.tables import Row


def by_variant(rows: list[Row]) -> list[Row]:
    """A row for each variant, by method and strength: "variant", "method" and "runs", its rows.

    The method of old rows is their variant.
    """
    runs: dict[str, list[Row]] = {}
    for row in sorted(rows, key=_place):
        runs.setdefault(row["variant"], []).append(row)
    return [
        {"variant": name, "method": found[0].get("method", name), "runs": found}
        for name, found in runs.items()
    ]


def _place(row: Row) -> tuple[int, float, int]:
    if "method" in row:
        strength = row["variant"].removeprefix(row["method"])
        return list(METHODS).index(row["method"]), float(strength or 0), row["seed"]
    settings = dict(s.split("=", 1) for s in row["settings"])  # later ones override earlier ones
    return 0, float(settings.get("l1_coefficient", 0)), 0


def halfway(run: Row) -> float:
    """The held-out cross-entropy after half of the steps; KeyError if it was not evaluated then."""
    evaluated = dict(run["evaluated"])
    return evaluated[max(evaluated) // 2]


def nnz(run: Row) -> float:
    """Mean non-zeros per token."""
    return float(np.mean(run["nnz_mean"]))


def union(run: Row) -> float:
    """The share of the neurons that 256 consecutive tokens use between them."""
    return float(np.mean(run["union"]["256"]))


def dead(run: Row) -> float:
    """The share of the neurons that were never active."""
    return float(np.mean(run["dead"])) / run["d_ff"]


def speedup(run: Row) -> float:
    """Time of the forward pass by dense XLA over that by the kernels, all layers together."""
    return total(run, "speedup", "xla_ms") / total(run, "speedup", "mosaic_ms")


def speedup_in_training(run: Row) -> float:
    """`speedup` of both passes."""
    return total(run, "training", "xla_ms") / total(run, "training", "mosaic_ms")


def speedup_without_dead(run: Row) -> float:
    """`speedup` if the kernels, but not XLA, leave out the neurons that were never active."""
    return total(run, "speedup", "xla_ms") / total(run, "pruned", "mosaic_ms")


def speedup_in_training_without_dead(run: Row) -> float:
    """`speedup_in_training` if the kernels, but not XLA, skip neurons that were never active.

    KeyError for rows that were measured before this was.
    """
    return total(run, "training", "xla_ms") / total(run, "skipping", "mosaic_ms")


def speedup_of_model(run: Row, passes: str) -> float:
    """`speedup` of the whole model; passes is "forward" or "training", which is both."""
    ms = _measured(run, "model")[passes]
    return ms["xla"] / ms["mosaic"]


def total(run: Row, part: str, key: str) -> float:
    """A time, summed over the layers."""
    return sum(_measured(run, part)[key])


def accuracy(run: Row, task: str) -> float:
    """The share of right answers to the questions of a task."""
    return _measured(run, "downstream")[task]["accuracy"]


def _measured(row: Row, key: str) -> dict[str, Any]:
    """What a part of the row holds; of one that could not be measured, nothing."""
    return row[key] or {}


def correlations(runs: list[Row]) -> dict[str, float]:
    """Pearson's r between speed-up and what it may depend on, over all layers of gated variants.

    Variants without a gate are left out, because another share of their time depends on sparsity.
    The result is empty if there are fewer than three layers.
    """
    gated = [run for run in runs if "model.gated=false" not in run["settings"]]
    if len(layers := layers_of(gated)) < 3:
        return {}
    r_nnz, r_share, _ = np.corrcoef(layers, rowvar=False)[-1]
    return {"mean nnz": float(r_nnz), "256 tokens share": float(r_share)}


def layers_of(runs: list[Row]) -> np.ndarray:
    """Mean nnz, 256 tokens share and speed-up of the layers of all runs, float64 [n, 3]."""
    layers = [
        layer
        for run in runs
        if run["speedup"]
        for layer in zip(
            run["speedup"]["nnz"], run["union"]["256"], run["speedup"]["factor"], strict=True
        )
    ]
    return np.reshape(np.array(layers, np.float64), (-1, 3))

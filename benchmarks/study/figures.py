"""The figures of the studies of small models in the prose of pages; see `benchmarks.figures`."""

from collections.abc import Callable
from typing import Any

import numpy as np

from benchmarks.quotes import Figure, Number, Records, least, most, percent, value
from benchmarks.study import values
from benchmarks.summaries import newest
from benchmarks.tables import Row

# The records, up to the date.
STUDY, EARLIER = "study-nvidia-h200", "study-nvidia-h100-80gb-hbm3"


def _mean(record: str, variant: str, of: Callable[[Row], float]) -> Number:
    """Of the runs of a variant."""
    return value(
        record, {"variant": variant}, lambda group: np.mean([of(r) for r in group["runs"]])
    )


def _means(
    record: str, of: Callable[[Row], float], form: str, variants: dict[str, str]
) -> dict[str, Figure]:
    """A figure for each name, a mean over the runs of its variant."""
    return {name: Figure(_mean(record, variant, of), form) for name, variant in variants.items()}


def _ce(run: Row) -> float:
    return run["held_out_ce"]


def _union(run: Row) -> float:
    return 100 * values.union(run)


def _dead(run: Row) -> float:
    return 100 * values.dead(run)


def _layer_ms(key: str) -> Callable[[Row], float]:
    """The time of a layer, forward, mean over the layers."""
    return lambda run: np.mean(run["speedup"][key])


def _right_names(run: Row) -> float:
    return 100 * values.accuracy(run, "names")


def _worst_error(group: Row) -> float:
    return max(max(run["speedup"]["mosaic_error"]) for run in group["runs"])


def _between_seeds(group: Row) -> float:
    found = [run["held_out_ce"] for run in group["runs"]]
    return max(found) - min(found)


def _layers(group: Row, passes: str) -> np.ndarray:
    """Speed-ups of a variant's layers, means over the seeds."""
    return np.mean([run[passes]["factor"] for run in group["runs"]], axis=0)


def _layer(variant: str, layer: int) -> Figure:
    """The speed-up of a layer, forward."""
    row = {"variant": variant}
    return Figure(value(STUDY, row, lambda group: _layers(group, "speedup")[layer]))


def _correlation(key: str) -> Figure:
    """Of a layer's speed-up with what it may depend on, over all layers of all variants."""

    def number(records: Records) -> float:
        _, groups = newest(STUDY, {}, records)
        return values.correlations([run for group in groups for run in group["runs"]])[key]

    return Figure(number)


def _first_tokens(run: Row) -> np.ndarray:
    """How many times as many neurons the first token has as the last positions, by layer."""
    by_position = np.array(run["nnz_by_position"])
    return by_position[:, 0] / by_position[:, -1]


def _first_token(run: Row) -> float:
    """The same of the mean over layers."""
    first, *_, last = np.mean(run["nnz_by_position"], axis=0)
    return first / last


def _costs_less(variant: str) -> Figure:
    """By how much the CE is lower than with L1 at a like U, 5.1 %."""
    l1, other = _mean(STUDY, "l1 2.0e-3", _ce), _mean(STUDY, variant, _ce)
    return Figure(lambda records: l1(records) - other(records))


_TARGET, _HALF = "U target and lasso 0.07", "l1 and lasso 6.0e-4"
_TRAINED: dict[str, Any] = {"variant": lambda name: name != "silu"}
_THREE_SEEDS: dict[str, Any] = {"runs": lambda runs: len(runs) == 3}

_STUDY = {
    **_means(
        STUDY,
        _ce,
        "{:.3f}",
        {
            "ce-relu": "relu",
            "ce-silu": "silu",
            "ce-l1-1e-3": "l1 1.0e-3",
            "ce-l1-1e-2": "l1 1.0e-2",
            "ce-lasso-1e-3": "lasso 1.0e-3",
            "ce-target": _TARGET,
            "ce-target-l1": "U target 0.2",
        },
    ),
    **_means(
        STUDY,
        _union,
        "{:.1f}",
        {
            "u-l1-1e-3": "l1 1.0e-3",
            "u-l1-2e-3": "l1 2.0e-3",
            "u-l1-1e-2": "l1 1.0e-2",
            "u-lasso-3e-4": "lasso 3.0e-4",
            "u-lasso-6e-4": "lasso 6.0e-4",
            "u-lasso-1e-3": "lasso 1.0e-3",
            "u-lasso-3e-3": "lasso 3.0e-3",
            "u-half": _HALF,
            "u-target": _TARGET,
            "u-target-l1": "U target 0.2",
        },
    ),
    **_means(
        STUDY, values.speedup, "{:.2f}", {"forward-target": _TARGET, "forward-most": "lasso 3.0e-3"}
    ),
    "both-target": Figure(_mean(STUDY, _TARGET, values.speedup_in_training)),
    "both-target-alive": Figure(_mean(STUDY, _TARGET, values.speedup_in_training_without_dead)),
    **_means(
        STUDY,
        values.speedup_without_dead,
        "{:.2f}",
        {"alive-l1-1e-3": "l1 1.0e-3", "alive-target": _TARGET, "alive-half": _HALF},
    ),
    **_means(
        STUDY,
        lambda run: values.speedup_of_model(run, "forward"),
        "{:.2f}",
        {"model-target": _TARGET, "model-most": "lasso 3.0e-3"},
    ),
    "model-both-target": Figure(
        _mean(STUDY, _TARGET, lambda run: values.speedup_of_model(run, "training"))
    ),
    **_means(
        STUDY,
        _right_names,
        "{:.1f}",
        {
            "names-relu": "relu",
            "names-l1-1e-3": "l1 1.0e-3",
            "names-half": _HALF,
            "names-target": _TARGET,
            "names-l1-2e-3": "l1 2.0e-3",
            "names-l1-1e-2": "l1 1.0e-2",
        },
    ),
    "layer-ms": Figure(_mean(STUDY, "lasso 3.0e-3", _layer_ms("mosaic_ms"))),
    "layer-dense-ms": Figure(_mean(STUDY, "lasso 3.0e-3", _layer_ms("xla_ms"))),
    "costs-less-target": _costs_less(_TARGET),
    "costs-less-lasso": _costs_less("lasso 3.0e-4"),
    "seeds-least": Figure(least(STUDY, _THREE_SEEDS, _between_seeds), "{:.3f}"),
    "seeds-most": Figure(most(STUDY, _THREE_SEEDS, _between_seeds), "{:.3f}"),
    "study-error": Figure(most(STUDY, _TRAINED, _worst_error), "{:.1e}"),
    "correlation-u": _correlation("256 tokens share"),
    "correlation-nnz": _correlation("mean nnz"),
    **{f"study-layer-{layer}": _layer("l1 3.0e-4", layer) for layer in (1, 4, 7)},
    "study-gradients-loss": Figure(
        percent(most(STUDY, _TRAINED, lambda group: 1 / _layers(group, "training").min()), over=1),
        "{:.0f}",
    ),
}

_L1, _AGAIN, _WARM_UP = "l1 3.0e-4", "l1 3.0e-4, re-initialised", "l1 3.0e-4, warm-up"
_NO_GATE = "l1 3.0e-4, not gated"

_EARLIER = {
    **_means(
        EARLIER, _dead, "{:.0f}", {"dead-l1": _L1, "dead-warm": _WARM_UP, "dead-again": _AGAIN}
    ),
    **_means(EARLIER, values.nnz, "{:.0f}", {"nnz-l1": _L1, "nnz-warm": _WARM_UP}),
    **_means(
        EARLIER, _ce, "{:.3f}", {"early-l1": _L1, "early-warm": _WARM_UP, "early-again": _AGAIN}
    ),
    **_means(EARLIER, _union, "{:.0f}", {"early-u-l1": _L1, "early-u-again": _AGAIN}),
    **_means(
        EARLIER, values.speedup, "{:.2f}", {"early-speed-l1": _L1, "early-speed-again": _AGAIN}
    ),
    **_means(EARLIER, _first_token, "{:.1f}", {"first-relu": "relu", "first-l1": "l1 1.0e-3"}),
    "first-most": Figure(_mean(EARLIER, _L1, lambda run: _first_tokens(run).max()), "{:.1f}"),
    "nnz-most": Figure(_mean(EARLIER, _L1, lambda run: max(run["nnz_max"])), "{:.0f}"),
    "no-gate-speed": Figure(_mean(EARLIER, _NO_GATE, values.speedup)),
    "no-gate-ce": Figure(_mean(EARLIER, _NO_GATE, _ce), "{:.3f}"),
    "no-gate-layers-least": Figure(
        _mean(EARLIER, _NO_GATE, lambda run: min(run["speedup"]["factor"]))
    ),
    "no-gate-layers-most": Figure(
        _mean(EARLIER, _NO_GATE, lambda run: max(run["speedup"]["factor"]))
    ),
    "active-l1-3e-5": Figure(
        _mean(EARLIER, "l1 3.0e-5", lambda run: 100 * values.nnz(run) / run["d_ff"]), "{:.0f}"
    ),
}

FIGURES: dict[str, Figure] = {**_STUDY, **_EARLIER}

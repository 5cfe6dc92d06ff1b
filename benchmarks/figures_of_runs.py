"""The figures of runs over time in the prose of pages; see `benchmarks.figures`."""

import numpy as np

from benchmarks.quotes import Figure, percent, printed, ratio, value
from benchmarks.tables import Row

# The records, up to the date.
RUNS, LAYERS = "wallclock-nvidia-h200", "analyze-0p4b-nvidia-h200"


def _last_ce(row: Row) -> float:
    return row["evaluated"]["held_out_ce"][-1]


def _last_rate(row: Row) -> float:
    return row["logged"]["tokens_per_second"][-1]


def _longest(row: Row) -> float:
    """The longest time from one logged step to the next, in seconds."""
    return float(np.diff(row["logged"]["seconds"]).max())


def _begun(row: Row) -> float:
    """The time of the first logged step since the start, in seconds."""
    return row["logged"]["seconds"][0]


def _usual(row: Row) -> float:
    """The median time from one logged step to the next, in seconds."""
    return float(np.median(np.diff(row["logged"]["seconds"])))


# What `analyze` prints for each layer of that run: times by XLA and by the kernels and the
# speed-up; mean non-zeros and the share that is dead; the share that 256 tokens use.
_LAYER = r"│ +\d │ +[\d.]+ │ +([\d.]+) │ +([\d.]+) │ +([\d.]+) │ +[\d.]+e"
_USED = r"│ +\d │ +([\d.]+) │.*%.*\(([\d.]+)%\) │"
_SHARED = r"│ +\d │(?: +[\d.]+% │){6} +([\d.]+)% │"

# The runs that the study tells of.
_RUN, _DENSE_RUN = ({"variant": name, "steps": 800} for name in ("sparse", "relu"))

_OF_THE_STUDY = {
    "run-seconds": Figure(value(RUNS, _RUN, "seconds"), "{:.0f}"),
    "run-dense-seconds": Figure(value(RUNS, _DENSE_RUN, "seconds"), "{:.0f}"),
    "run-rate": Figure(value(RUNS, _RUN, _last_rate), "{:,.0f}"),
    "run-dense-rate": Figure(value(RUNS, _DENSE_RUN, _last_rate), "{:,.0f}"),
    "run-speedup": Figure(ratio(RUNS, _RUN, _DENSE_RUN, _last_rate)),
    "run-layers-least": Figure(printed(LAYERS, _LAYER, lambda rows: rows[:, 2].min())),
    "run-layers-most": Figure(printed(LAYERS, _LAYER, lambda rows: rows[:, 2].max())),
    "run-layers": Figure(printed(LAYERS, _LAYER, lambda rows: rows[:, 0].sum() / rows[:, 1].sum())),
    "run-nnz": Figure(printed(LAYERS, _USED, lambda rows: rows[:, 0].mean()), "{:.1f}"),
    "run-dead": Figure(printed(LAYERS, _USED, lambda rows: rows[:, 1].mean()), "{:.0f}"),
    "run-union": Figure(printed(LAYERS, _SHARED, lambda rows: rows.mean()), "{:.1f}"),
    "run-energy": Figure(ratio(RUNS, _RUN, _DENSE_RUN, "joules")),
    "run-ce": Figure(value(RUNS, _RUN, _last_ce), "{:.3f}"),
    "run-dense-ce": Figure(value(RUNS, _DENSE_RUN, _last_ce), "{:.3f}"),
}

# Against dense SiLU in bfloat16.
_SOONER = {
    f"sooner-{clock}{name}": Figure(value(RUNS, {"variant": run}, f"{clock}_gain"))
    for clock in ("seconds", "joules")
    for name, run in (
        ("", "sparse"),
        ("-float8", "sparse, float8"),
        ("-dense-float8", "silu, float8"),
    )
}

_PAUSES = {
    f"{name}-float8": Figure(value(RUNS, {"variant": "sparse, float8"}, seconds), form)
    for name, seconds, form in (
        ("begun", _begun, "{:.0f}"),
        ("usual", _usual, "{:.1f}"),
        ("longest", _longest, "{:.1f}"),
    )
}

# On two GPUs, data parallel and with FSDP: of one micro-batch a step, and of the shipped many.
_PARALLEL, _ON_TWO = "training-data-parallel-float8{}-nvidia-h200", {"devices": 2}
_MESHES = {
    **{
        f"data-efficiency-float8{name}": Figure(
            percent(value(_PARALLEL.format(name), _ON_TWO | {"fsdp": 1}, "efficiency")), form
        )
        for name, form in (
            ("", "{:.0f}"),
            ("-24", "{:.1f}"),
            ("-32", "{:.1f}"),
            ("-shipped", "{:.1f}"),
        )
    },
    "fsdp-efficiency-float8": Figure(
        percent(value(_PARALLEL.format(""), _ON_TWO | {"fsdp": 2}, "efficiency")), "{:.0f}"
    ),
    "exposed-float8": Figure(
        value(_PARALLEL.format(""), _ON_TWO | {"fsdp": 1}, "exposed_ms"), "{:.0f}"
    ),
}

FIGURES: dict[str, Figure] = {**_OF_THE_STUDY, **_SOONER, **_PAUSES, **_MESHES}

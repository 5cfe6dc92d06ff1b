"""Defines the short tables within pages of docs, whose rows are picked from the records.

A page marks the place of a summary by its name in SUMMARIES; `benchmarks.render` fills it in.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks.pages import TABLES
from benchmarks.study import report
from benchmarks.tables import UNKNOWN, Cell, Row, number, text_of, yes
from benchmarks.training_tables import mesh


@dataclass(frozen=True)
class Pick:
    """A line of a summary: a row of a record, and the row that it is compared with.

    Attributes:
      record: the start of the record's file name, up to the date. Of several records, the newest
        that has the row counts.
      ours: values that exactly one row must have, of those that the page of results shows, as `has`
        compares them.
      baseline: values of the row to compare with; of several, the last one before ours counts. By
        default it is ours.
    """

    record: str
    ours: Mapping[str, Any]
    baseline: Mapping[str, Any] = field(default_factory=dict)

    def find(self, records: Mapping[Path, Mapping[str, Any]]) -> tuple[Path, Row, Row]:
        """The record, our row and the baseline.

        Args:
          records: all records by their path, the newest first.

        Raises:
          ValueError: no record has our row, one has several of them, or it has no baseline.
        """
        path, rows = newest(self.record, self.ours, records)
        ours = [i for i, row in enumerate(rows) if has(row, self.ours)]
        if len(ours) > 1:
            raise ValueError(f"{path.stem} has {len(ours)} rows with {dict(self.ours)}, not 1")
        baseline = [row for row in rows[: ours[0] + 1] if has(row, self.baseline)]
        if not baseline:
            raise ValueError(f"{path.stem} has no row with {dict(self.baseline)} before ours")
        return path, rows[ours[0]], baseline[-1]


def newest(
    name: str, values: Mapping[str, Any], records: Mapping[Path, Mapping[str, Any]]
) -> tuple[Path, list[Row]]:
    """The newest record of a name that has a row with these values, and all rows that it measured.

    Rows that failed do not count, so that an older record still tells what it measured.

    Args:
      name: the start of the record's file name, up to the date.
      values: as `Pick.ours`.
      records: all records by their path, the newest first.

    Raises:
      ValueError: no record of that name has such a row.
    """
    for path, record in records.items():
        if path.stem.startswith(f"{name}-20"):
            found = TABLES[record["benchmark"]].lines(record["rows"])
            rows = [row for row in found if "failed" not in row]
            if any(has(row, values) for row in rows):
                return path, rows
    raise ValueError(f"no record {name} has a row with {dict(values)}")


def has(row: Row, values: Mapping[str, Any]) -> bool:
    """Whether a row has these values, compared as follows.

    Floats are rounded to one decimal, a function must be true of the value, and None stands for a
    key that the row may lack.
    """
    return all(_is(row.get(key), wanted) for key, wanted in values.items())


def _is(value: Any, wanted: Any) -> bool:
    if callable(wanted):
        return value is not None and wanted(value)
    return (round(value, 1) if isinstance(wanted, float) and value is not None else value) == wanted


@dataclass(frozen=True)
class Summary:
    """A short table within a page: lines picked from records, each with a link to its record.

    Attributes:
      columns: for each heading, a function from our row and the baseline to a cell.
      picks: the lines.
    """

    columns: Mapping[str, Callable[[Row, Row], str]]
    picks: tuple[Pick, ...]


_H100, _H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"
_WORK = {
    "forward": "scoring",
    "prefill": "prefill",
    "decode": "decoding",
    "training": "training step",
}


def _pick(record: str, ours: str, case: Mapping[str, Any], dense: str = "xla") -> Pick:
    """A line that compares two implementations of the same case."""
    return Pick(record, {**case, "implementation": ours}, {**case, "implementation": dense})


def _block(record: str, packing: str | None, case: Mapping[str, Any]) -> Pick:
    """A line that compares a block by the kernels with this packing."""
    ours = {**case, "implementation": "mosaic", "packing": packing, "heavy_rows": 0}
    return Pick(f"{record}-{_H100}", ours, {**case, "implementation": "xla"})


def _score(record: str, model: str, ours: str = "mosaic, relu") -> Pick:
    return _pick(record, ours, {"model": model, "direction": "forward"}, "xla, relu")


def _step(config: str) -> Pick:
    case = {"config": config, "devices": 1}
    return _pick(f"training-{config}-{_H100}", "sparse, relu", case, "xla, relu")


def _mesh_step(config: str, micro_batch: int, devices: int, fsdp: int) -> Pick:
    """A line that compares a dense step on several devices with one on a single device."""
    dense = {"config": config, "micro_batch": micro_batch, "implementation": "xla, relu"}
    ours = {**dense, "devices": devices, "fsdp": fsdp}
    return Pick(f"training-{config}-{_H200}", ours, {**dense, "devices": 1})


def _ours(cell: Cell) -> Callable[[Row, Row], str]:
    return lambda ours, baseline: cell(ours)


def _baseline(cell: Cell) -> Callable[[Row, Row], str]:
    return lambda ours, baseline: cell(baseline)


def _speedup(ours: Row, baseline: Row) -> str:
    return f"**{baseline['ms'] / ours['ms']:.2f}x**"


def _energy_ratio(ours: Row, baseline: Row) -> str:
    if "joules_per_token" not in ours:
        return UNKNOWN
    return f"{ours['joules_per_token'] / baseline['joules_per_token']:.2f}x"


def _sequences(row: Row) -> str:
    if "direction" in row:
        return f"{row['batch']} x {row['context']}"
    return f"{row['micro_batch']} x {row['batch_tokens'] // row['micro_batch']}"


def _named(row: Row) -> str:
    """The model, and which of its weights have 8 bits."""
    _, _, in_8_bits = row["implementation"].partition("fp8")
    return (row.get("model") or row["config"]) + (in_8_bits and f", FP8{in_8_bits}")


SUMMARIES: dict[str, Summary] = {
    "forward": Summary(
        columns={
            "tokens": _ours(number("m", "{:,}")),
            "pattern": _ours(number("pattern")),
            "mean nnz of 5632": _ours(number("nnz_mean", "{:.0f}")),
            "dense XLA, ms": _baseline(number("ms", "{:.3f}")),
            "kernels, ms": _ours(number("ms", "{:.3f}")),
            "speed-up": _speedup,
        },
        picks=tuple(
            _block(record, packing, {"m": m, "pattern": pattern, "nnz_mean": nnz})
            for record, packing, m, pattern, nnz in (
                ("ffn-goals", "unions", 16384, "recorded", 20.0),
                ("ffn-goals", "unions", 16384, "skewed", 29.0),
                ("ffn-goals", "unions", 16384, "skewed", 299.6),
                ("ffn-goals", "unions", 16384, "uniform", 29.3),
                ("ffn-goals", "unions", 16384, "uniform", 1497.0),
                ("ffn-few", None, 32, "skewed", 28.2),
                ("ffn-few", None, 1, "skewed", 29.0),
            )
        ),
    ),
    "gradients": Summary(
        columns={
            "pattern": _ours(number("pattern")),
            "mean nnz of 5632": _ours(number("nnz_mean", "{:.0f}")),
            "gated": _ours(yes("gated")),
            "union": _ours(number("union", "{:.2f}")),
            "dense XLA, ms": _ours(number("baseline_ms", "{:.2f}")),
            "listed, as drawn": _baseline(number("listed", "{:.2f}")),
            "speed-up": _baseline(number("speedup", "{:.2f}x")),
            "listed, by use": _ours(number("listed", "{:.2f}")),
            "speed-up, by use": _ours(lambda row: f"**{row['speedup']:.2f}x**"),
        },
        picks=tuple(
            Pick(f"gradients-{_H200}", {**case, "order": "by use"}, {**case, "order": "as drawn"})
            for case in (
                {
                    "pattern": pattern,
                    "nnz_mean": nnz,
                    "gated": gated,
                    "gradient_capacity": 1.0,
                    "matmul_dtype": None,
                }
                for pattern, nnz, gated in (
                    ("recorded", 20.0, True),
                    ("skewed", 29.0, True),
                    ("skewed", 60.1, True),
                    ("skewed", 120.1, True),
                    ("skewed", 299.6, True),
                    ("uniform", 29.3, True),
                    ("uniform", 119.2, True),
                    ("skewed", 29.0, False),
                )
            )
        ),
    ),
    "models": Summary(
        columns={
            "work": _ours(lambda row: _WORK[row.get("direction", "training")]),
            "model": _ours(_named),
            "sequences": _ours(_sequences),
            "dense XLA, tokens/s": _baseline(number("tokens_per_second", "{:,.0f}")),
            "kernels, tokens/s": _ours(number("tokens_per_second", "{:,.0f}")),
            "speed-up": _speedup,
            "energy": _energy_ratio,
        },
        picks=(
            _score(f"inference-{_H100}", "2b"),
            _score(f"inference-{_H100}", "2b", "mosaic, relu, fp8 gate and up"),
            _score(f"inference-{_H100}", "2b", "mosaic, relu, fp8 all but down"),
            _score(f"inference-1p5b-{_H100}", "1p5b"),
            _score(f"inference-{_H100}", "0p5b"),
            _step("2b"),
            _step("0p5b"),
        ),
    ),
    "generation": Summary(
        columns={
            "work": _ours(lambda row: _WORK[row["direction"]]),
            "sequences": _ours(_sequences),
            "dense, ms": _ours(number("baseline_ms", "{:.2f}")),
            "kernels, ms": _ours(number("ms", "{:.2f}")),
            "speed-up": _ours(lambda row: f"**{row['speedup']:.2f}x**"),
            "energy": _ours(number("energy", "{:.2f}x")),
        },
        picks=tuple(
            Pick(
                f"inference-cached-{_H200}",
                {"direction": direction, "batch": batch, "implementation": "mosaic, relu"},
            )
            for direction in ("decode", "prefill")
            for batch in (1, 8, 32)
        ),
    ),
    "scaling": Summary(
        columns={
            "model": _ours(number("config")),
            "data x fsdp": _ours(mesh),
            "compute, estimate": _ours(number("estimate_ms", "{:.0f}")),
            "the step": _ours(number("ms", "{:.0f}")),
            "over the mesh, estimate": _ours(number("estimate_collective_ms", "{:.1f}")),
            "exposed": _ours(number("exposed_ms", "{:.1f}")),
            "longer than on one GPU": lambda ours, alone: f"{ours['ms'] - alone['ms']:.0f}",
        },
        picks=tuple(
            _mesh_step(config, micro_batch, devices, fsdp)
            for config, micro_batch in (("0p5b", 96), ("1p5b", 36))
            for devices, fsdp in ((1, 1), (2, 1), (4, 1), (4, 4))
        ),
    ),
    "study": Summary(
        columns={
            heading: _ours(partial(text_of, {**report.TABLE.case, **report.TABLE.results}[name]))
            for heading, name in {
                "variant": "variant",
                "seeds": "seeds",
                "held-out CE": "held-out CE",
                "nnz": "nnz",
                "U": "256 tokens share",
                "dead": "dead",
                "forward": "speed-up",
                "both passes": "both passes",
                "both, without the dead": "both, without the dead",
            }.items()
        },
        picks=tuple(
            Pick(f"study-{_H200}", {"variant": name})
            for name in (
                "silu",
                "relu",
                "l1 1.0e-4",
                "l1 3.0e-4",
                "l1 1.0e-3",
                "l1 2.0e-3",
                "l1 3.0e-3",
                "lasso 3.0e-4",
                "lasso 6.0e-4",
                "l1 and lasso 6.0e-4",
                "l1 and lasso 1.0e-3",
                "U target and lasso 0.07",
            )
        ),
    ),
}

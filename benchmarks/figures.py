"""Defines the figures in the prose of pages, each by the record and the rows that it is from.

A page names a figure in a comment directly behind it, `1.31<!-- figure: scoring-2b -->`, and
`benchmarks.render` puts the value before the comment. Units stay in the prose.
"""

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from benchmarks.summaries import Pick, has, newest
from benchmarks.tables import Row

Records = Mapping[Path, Mapping[str, Any]]  # by their path, the newest first
Figure = Callable[[Records], str]

BASELINES = ("xla", "xla, relu", "xla, silu", "tokamax", "torch", "torch, silu")


def value(record: str, row: Mapping[str, Any], key: str, form: str = "{:.2f}") -> Figure:
    """A value of one row, picked as `Pick` says."""
    return lambda records: form.format(Pick(record, row).find(records)[1][key])


def ratio(
    record: str, row: Mapping[str, Any], over: Mapping[str, Any], key: str, form: str = "{:.2f}"
) -> Figure:
    """A value of one row over that of another of the same record, both picked as `Pick` says."""

    def text(records: Records) -> str:
        _, ours, baseline = Pick(record, row, over).find(records)
        return form.format(ours[key] / baseline[key])

    return text


def speedup(record: str, case: Mapping[str, Any], ours: str) -> Figure:
    """How many times as fast a row is as the fastest baseline of its case, two decimals.

    Args:
      record: the start of the record's file name, up to the date.
      case: values that our row and those of the baselines share.
      ours: the implementation of our row.
    """

    def text(records: Records) -> str:
        path, row, _ = Pick(record, {**case, "implementation": ours}).find(records)
        _, rows = newest(record, {**case, "implementation": ours}, records)
        times = [r["ms"] for r in rows if has(r, case) and r["implementation"] in BASELINES]
        if not times:
            raise ValueError(f"{path.stem} has no baseline with {dict(case)}")
        return f"{min(times) / row['ms']:.2f}"

    return text


def extremes(
    name: str,
    record: str,
    rows: Mapping[str, Any],
    of: Callable[[Row], float],
    form: str = "{:.2f}",
) -> dict[str, Figure]:
    """NAME-least and NAME-most: of all rows with these values, in the newest record with one."""

    def found(records: Records) -> list[float]:
        _, lines = newest(record, rows, records)
        return [of(row) for row in lines if has(row, rows)]

    return {
        f"{name}-least": lambda records: form.format(min(found(records))),
        f"{name}-most": lambda records: form.format(max(found(records))),
    }


_H100, _H200 = "nvidia-h100-80gb-hbm3", "nvidia-h200"


FIGURES: dict[str, Figure] = {
    "scoring-2b": speedup(
        f"inference-{_H100}", {"model": "2b", "direction": "forward"}, "mosaic, relu"
    ),
}

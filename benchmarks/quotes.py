"""What a figure in the prose of a page may be of the rows of a record: its kinds, as functions.

`benchmarks.figures` has the figures themselves.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.record import RESULTS
from benchmarks.summaries import Pick, has, newest
from benchmarks.tables import Row

Records = Mapping[Path, Mapping[str, Any]]  # by their path, the newest first
Number = Callable[[Records], float]
Of = str | Callable[[Row], float]  # a key, or what is made of a row

BASELINES = (
    "xla", "xla, relu", "xla, silu", "tokamax", "torch", "torch, compiled", "torch, silu"
)  # fmt: skip


@dataclass(frozen=True)
class Figure:
    """A number of the records, and how it is written.

    Attributes:
      number: finds it in all records.
      form: formats it; exponents have one digit.
    """

    number: Number
    form: str = "{:.2f}"

    def text(self, records: Records) -> str:
        """As it stands on a page."""
        return self.form.format(self.number(records)).replace("e-0", "e-")


def value(record: str, row: Mapping[str, Any], of: Of) -> Number:
    """A value of one row, which is picked as `Pick` says."""
    return lambda records: _of(Pick(record, row).find(records)[1], of)


def ratio(record: str, row: Mapping[str, Any], over: Mapping[str, Any], of: Of) -> Number:
    """A value of one row over that of another of the same record, each picked as `Pick` says."""

    def number(records: Records) -> float:
        path, ours, _ = Pick(record, row).find(records)
        _, other, _ = Pick(record, over).find({path: records[path]})
        return _of(ours, of) / _of(other, of)

    return number


def speedup(record: str, case: Mapping[str, Any], ours: str) -> Number:
    """How many times as fast a row is as the fastest baseline of its case.

    Args:
      record: the start of the record's file name, up to the date.
      case: values that our row and those of the baselines share.
      ours: the implementation of our row.
    """

    def number(records: Records) -> float:
        path, row, _ = Pick(record, {**case, "implementation": ours}).find(records)
        _, rows = newest(record, case, {path: records[path]})
        dense = [r for r in rows if has(r, case) and r["implementation"] in BASELINES]
        times = [r["ms"] for r in dense]
        if not times:
            raise ValueError(f"{path.stem} has no baseline with {dict(case)}")
        return min(times) / row["ms"]

    return number


def least(record: str, rows: Mapping[str, Any], of: Of) -> Number:
    """The least value of all rows with these values, but for those that failed."""
    return lambda records: min(_values(record, rows, of, records))


def most(record: str, rows: Mapping[str, Any], of: Of) -> Number:
    """The largest value of all rows with these values, but for those that failed."""
    return lambda records: max(_values(record, rows, of, records))


def printed(name: str, pattern: str, of: Callable[[np.ndarray], float]) -> Number:
    """What is made of numbers in the newest record of this name that is a text.

    Args:
      name: the start of the record's file name, up to the date.
      pattern: a regular expression with a group for each number of a line.
      of: takes the numbers, float64 [lines, groups].
    """

    def number(records: Records) -> float:
        path = sorted(RESULTS.glob(f"{name}-20*.txt"))[-1]
        lines = [match.groups() for match in re.finditer(pattern, path.read_text())]
        return of(np.array(lines, np.float64))

    return number


def total(record: str, rows: Mapping[str, Any], of: Of) -> Number:
    """The sum over all rows with these values, but for those that failed."""
    return lambda records: sum(_values(record, rows, of, records))


def percent(number: Number, *, over: float = 0) -> Number:
    """A share in percent, or by how many percent a ratio is over 1."""
    return lambda records: 100 * (number(records) - over)


def _values(record: str, rows: Mapping[str, Any], of: Of, records: Records) -> list[float]:
    _, found = newest(record, rows, records)
    return [_of(row, of) for row in found if has(row, rows)]


def _of(row: Row, of: Of) -> float:
    return of(row) if callable(of) else row[of]

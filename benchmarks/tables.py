"""Turns the rows of a record into a Markdown table."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Cell = Callable[[Row], str]  # the text of a cell; KeyError if the row lacks the value

UNKNOWN = "-"


@dataclass(frozen=True)
class Table:
    """The page of one benchmark: its text, table and plots.

    Attributes:
      title: the heading of the page.
      about: the first paragraph of the page.
      columns: for each heading, the cell of a row. Columns without any value are left out.
      spread: the cell of an implementation. If given, rows that agree in `columns` share a line,
        which has a column for each implementation.
      joined: columns after those of `spread`; a cell lists a value for each implementation.
      order: sorts the rows, or makes one of several.
      notes: makes a paragraph below the table.
      plots: for each suffix of a file name, a function that draws a record into a figure.
    """

    title: str
    about: str
    columns: Mapping[str, Cell]
    spread: Cell | None = None
    joined: Mapping[str, Cell] = field(default_factory=dict)
    order: Callable[[list[Row]], list[Row]] = list
    notes: Callable[[list[Row]], str] = lambda rows: ""
    plots: Mapping[str, Callable[[Any, dict[str, Any]], None]] = field(default_factory=dict)

    def render(self, rows: Iterable[Row]) -> str:
        """The rows as Markdown."""
        rows = self.order(list(rows))
        if self.spread is None:
            return markdown(list(self.columns), [_cells(self.columns, row) for row in rows])
        lines: list[tuple[list[str], dict[str, Row]]] = []
        for row in rows:
            cells, name = _cells(self.columns, row), block(row)
            if not lines or lines[-1][0] != cells or name in lines[-1][1]:
                lines.append((cells, {}))
            lines[-1][1][name] = row
        names = list(dict.fromkeys(block(row) for row in rows))
        return markdown(
            [*self.columns, *names, *self.joined],
            [
                [
                    *cells,
                    *(text_of(self.spread, found.get(name, {})) for name in names),
                    *(_join(cell, found.values()) for cell in self.joined.values()),
                ]
                for cells, found in lines
            ],
        )


def markdown(titles: list[str], lines: list[list[str]]) -> str:
    """A Markdown table, without the columns that have no value in any line."""
    known = [any(line[i] != UNKNOWN for line in lines) for i in range(len(titles))]
    kept = [
        [cell for cell, keep in zip(line, known, strict=True) if keep] for line in (titles, *lines)
    ]
    text = ["| " + " | ".join(line) + " |" for line in kept]
    return "\n".join([text[0], "|---" * sum(known) + "|", *text[1:]])


def number(key: str, form: str) -> Cell:
    """A cell with the formatted value of a key."""
    return lambda row: form.format(row[key])


def block(row: Row) -> str:
    """The implementation of a row, with its packing and gradients if the row names them."""
    named = (row.get(key) for key in ("implementation", "packing", "gradients"))
    return ", ".join(name for name in named if name)


def yes(key: str) -> Cell:
    """A cell with "yes" or "no", by the value of a key."""
    return lambda row: "yes" if row[key] else "no"


def _cells(columns: Mapping[str, Cell], row: Row) -> list[str]:
    return [text_of(cell, row) for cell in columns.values()]


def text_of(cell: Cell, row: Row) -> str:
    """The text of a cell, `UNKNOWN` if the row lacks the value."""
    try:
        return cell(row)
    except KeyError:
        return UNKNOWN


def _join(cell: Cell, rows: Iterable[Row]) -> str:
    return " / ".join(text for row in rows if (text := text_of(cell, row)) != UNKNOWN) or UNKNOWN

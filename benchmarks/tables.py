"""How the rows of a record become a Markdown table."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

Row = Mapping[str, Any]
Cell = Callable[[Row], str]  # what a cell says of a row; KeyError if the row does not know

UNKNOWN = "-"


@dataclass(frozen=True)
class Table:
    """How one kind of record is shown.

    Attributes:
      title: the heading of its page.
      about: the first paragraph of its page.
      columns: by heading, the cell of a row. A column of which no row knows anything is left out.
      spread: the cell of an implementation. With it, rows that agree in `columns` share a line,
        which has a column for each implementation.
      joined: columns behind the spread ones, whose cells show one value for each implementation.
      order: the rows in the order of the lines.
      notes: a paragraph below the table.
      plots: by suffix of the file's name, what draws a record into a figure.
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
                    *(_cell(self.spread, found.get(name, {})) for name in names),
                    *(_join(cell, found.values()) for cell in self.joined.values()),
                ]
                for cells, found in lines
            ],
        )


def markdown(titles: list[str], lines: list[list[str]]) -> str:
    """A table, without the columns that are unknown in every line."""
    known = [any(line[i] != UNKNOWN for line in lines) for i in range(len(titles))]
    kept = [
        [cell for cell, keep in zip(line, known, strict=True) if keep] for line in (titles, *lines)
    ]
    text = ["| " + " | ".join(line) + " |" for line in kept]
    return "\n".join([text[0], "|---" * sum(known) + "|", *text[1:]])


def number(key: str, form: str) -> Cell:
    """A cell that formats the value of a key."""
    return lambda row: form.format(row[key])


def block(row: Row) -> str:
    """What computed a row; the packing and the gradients of the block, where the row names them."""
    named = (row.get(key) for key in ("implementation", "packing", "gradients"))
    return ", ".join(name for name in named if name)


def yes(key: str) -> Cell:
    """A cell that says whether."""
    return lambda row: "yes" if row[key] else "no"


def _cells(columns: Mapping[str, Cell], row: Row) -> list[str]:
    return [_cell(cell, row) for cell in columns.values()]


def _cell(cell: Cell, row: Row) -> str:
    try:
        return cell(row)
    except KeyError:
        return UNKNOWN


def _join(cell: Cell, rows: Iterable[Row]) -> str:
    return " / ".join(text for row in rows if (text := _cell(cell, row)) != UNKNOWN) or UNKNOWN

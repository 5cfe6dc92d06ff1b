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
      case: for each heading, a cell that says what was measured. What is the same in all lines
        stands once, above the table. Columns without any value are left out.
      results: for each heading, a cell that says what was found.
      name: names a row among those of its case. If given, and if there are no more names than
        cases, a line shows a case: the first of `results` in a column for each name, the others
        with a value for each name in one cell, or one value if all agree.
      lines: sorts the rows, or makes one of several.
      notes: makes a paragraph below the table.
      plots: for each suffix of a file name, a function that draws a record into a figure.
      drawn: whether plots of these rows show anything.
    """

    title: str
    about: str
    case: Mapping[str, Cell]
    results: Mapping[str, Cell]
    name: Cell | None = None
    lines: Callable[[list[Row]], list[Row]] = list
    notes: Callable[[list[Row]], str] = lambda rows: ""
    plots: Mapping[str, Callable[[Any, dict[str, Any]], None]] = field(default_factory=dict)
    drawn: Callable[[list[Row]], bool] = lambda rows: True

    def render(self, rows: Iterable[Row]) -> str:
        """The rows as Markdown."""
        rows = self.lines(list(rows))
        case = dict(self.case)
        shared = {}
        for heading, cell in self.case.items():
            found = {text_of(cell, row) for row in rows}
            if len(rows) > 1 and len(found) == 1:
                shared[heading] = found.pop()
                del case[heading]
        known = [f"{heading} {text}" for heading, text in shared.items() if text != UNKNOWN]
        above = f"All lines: {', '.join(known)}.\n\n" if known else ""
        return above + (self._by_case(case, rows) or self._by_row(case, rows))

    def _by_row(self, case: Mapping[str, Cell], rows: list[Row]) -> str:
        named = {"block": self.name} if self.name else {}
        columns = {**case, **named, **self.results}
        return markdown(list(columns), [_cells(columns, row) for row in rows])

    def _by_case(self, case: Mapping[str, Cell], rows: list[Row]) -> str:
        """Empty if a line shows a row."""
        if self.name is None:
            return ""
        lines: list[tuple[list[str], dict[str, Row]]] = []
        for row in rows:
            cells, name = _cells(case, row), self.name(row)
            if not lines or lines[-1][0] != cells or name in lines[-1][1]:
                lines.append((cells, {}))
            lines[-1][1][name] = row
        names = list(dict.fromkeys(map(self.name, rows)))
        if len(names) > len(lines):
            return ""
        (_, spread), *joined = self.results.items()
        return markdown(
            [*case, *names, *(heading for heading, _ in joined)],
            [
                [
                    *cells,
                    *(text_of(spread, found.get(name, {})) for name in names),
                    *(_join(cell, found.values()) for _, cell in joined),
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


def gib(key: str) -> Cell:
    """Bytes in GiB; a program that comes from the compilation cache states 0."""
    return lambda row: f"{row[key] / 2**30:.1f}" if row[key] else UNKNOWN


def number(key: str, form: str = "{}") -> Cell:
    """A cell with the formatted value of a key."""
    return lambda row: form.format(row[key])


def error(key: str) -> Cell:
    """A cell with an error, to two digits."""
    return lambda row: f"{row[key]:.1e}".replace("e-0", "e-")


def milliseconds(row: Row) -> str:
    """A row's time and, unless it is the baseline or has none, its speed-up."""
    speedup = row.get("speedup", 1)
    over = "" if speedup == 1 else f" ({speedup:.2f}x)"
    return f"{row['ms']:{'.3f' if row['ms'] < 10 else '.4g'}}{over}"


def block(row: Row) -> str:
    """The implementation of a row, with its packing and gradients if the row names them."""
    named = (row.get(key) for key in ("implementation", "packing", "gradients", "extra"))
    return ", ".join(name for name in named if name)


def grouped(rows: list[Row], key: Callable[[Row], Any]) -> list[list[Row]]:
    """Rows with the same key together, in the order of the first of each."""
    groups: dict[Any, list[Row]] = {}
    for row in rows:
        groups.setdefault(key(row), []).append(row)
    return list(groups.values())


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
    texts = [text for row in rows if (text := text_of(cell, row)) != UNKNOWN]
    return " / ".join(texts if len(set(texts)) > 1 else texts[:1]) or UNKNOWN

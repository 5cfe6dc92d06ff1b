"""Turns the records of the benchmarks into docs/results/*.md and into the tables of docs/*.md.

    python -m benchmarks.render
        makes all pages and plots of docs/results and the summaries
    python -m benchmarks.render RECORD ... [--out DIRECTORY]
        prints the tables of these records, or writes their pages and plots

A page of docs marks the place of a summary by `<!-- table: NAME -->` and `<!-- end of table -->`.
"""

import argparse
import json
import os
import re
from pathlib import Path
from typing import Any

from benchmarks.pages import TABLES
from benchmarks.record import RESULTS
from benchmarks.remarks import REMARKS
from benchmarks.summaries import SUMMARIES
from benchmarks.tables import markdown
from twell_jax.plotting import drawn

DOCS = Path(__file__).parents[1] / "docs"
PAGES = DOCS / "results"

_MADE = "<!-- `python -m benchmarks.render` makes this page from the records; do not edit it. -->"
_PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    parser.add_argument("--out", type=Path, help="a directory for pages and plots")
    args = parser.parse_args()
    paths = args.records or sorted(RESULTS.glob("*.json"))
    records = {path: json.loads(path.read_text()) for path in paths}
    for path, record in records.items():
        if record["benchmark"] not in TABLES:
            parser.error(f"{path}: no table shows {record['benchmark']!r}, only {list(TABLES)}")
    if args.records and not args.out:
        for record in records.values():
            print(TABLES[record["benchmark"]].render(record["rows"]))
        return
    out = args.out or PAGES
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages(records, out).items():
        (out / name).write_text(text)
        print(out / name)
    for path, record in records.items():
        for suffix, draw in TABLES[record["benchmark"]].plots.items():
            with drawn(out / f"{path.stem}{suffix}.png", height=4.5) as figure:
                draw(figure, record)
    if not args.records:
        for path in sorted(DOCS.glob("*.md")):
            path.write_text(with_summaries(path))


def pages(records: dict[Path, dict[str, Any]], out: Path) -> dict[str, str]:
    """The pages of these records by file name: one for each benchmark.

    The newest record comes first; of the same day, the one with the shortest name; of these,
    the last.
    """

    def place(path: Path) -> tuple[str, int, int]:
        of_day = re.search(r"-\d{8}-(\d+)$", path.stem)
        return records[path]["date"], -len(short_name(path)), int(of_day[1]) if of_day else 1

    sections: dict[str, list[str]] = {}
    for path in sorted(sorted(records), key=place, reverse=True):
        record = records[path]
        sections.setdefault(record["benchmark"], []).append(section(path, record, out))
    return {
        f"{name}.md": "\n\n".join(
            [f"# {TABLES[name].title}", _MADE, TABLES[name].about, *sections[name]]
        )
        + "\n"
        for name in sorted(sections)
    }


def section(path: Path, record: dict[str, Any], out: Path) -> str:
    """The section of a page for one record: its origin, remark, table and plots."""
    table = TABLES[record["benchmark"]]
    origin = f"{record['device']}, {record['date']}"
    commit = f"commit {record['commit'][:7]}, " if record["commit"] else ""
    parts = [
        f"## {short_name(path)}, {origin}",
        f"[{path.name}]({_link(path, out)}), {commit}jax {record['versions']['jax']}.",
        *([REMARKS[path.stem]] if path.stem in REMARKS else []),
        table.render(record["rows"]),
    ]
    if notes := table.notes(record["rows"]):
        parts.append(notes)
    parts += [
        f"![{suffix.strip('-') or table.title}]({path.stem}{suffix}.png)" for suffix in table.plots
    ]
    return "\n\n".join(parts)


def with_summaries(path: Path) -> str:
    """The text of a page, with each of its summaries made from the records."""

    def fill(place: re.Match) -> str:
        return f"{place[1]}\n{summary(place[2], path.parent)}\n\n{place[3]}"

    return _PLACE.sub(fill, path.read_text())


def summary(name: str, directory: Path) -> str:
    """A summary as Markdown, with links for a page in `directory`."""
    spec, lines = SUMMARIES[name], []
    for pick in spec.picks:
        path = RESULTS / f"{pick.record}.json"
        rows = pick.rows(json.loads(path.read_text())["rows"])
        source = f"[{short_name(path)}]({_link(path, directory)})"
        lines.append([*(cell(*rows) for cell in spec.columns.values()), source])
    return markdown([*spec.columns, "record"], lines)


def short_name(path: Path) -> str:
    """A record's name without device and date."""
    return path.stem.split("-nvidia")[0]


def _link(path: Path, directory: Path) -> str:
    return Path(os.path.relpath(path, directory)).as_posix()


if __name__ == "__main__":
    main()

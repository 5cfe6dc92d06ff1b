"""Turns the records of the benchmarks into docs/results/*.md, and fills docs/*.md and README.md.

    python -m benchmarks.render
        makes all pages and plots of docs/results, and the summaries and figures of other pages;
        adds the kernels of today to benchmarks/kernels.txt
    python -m benchmarks.render RECORD ... [--out DIRECTORY]
        prints the tables of these records, or writes their pages and plots

A page marks the place of a summary by `<!-- table: NAME -->` and `<!-- end of table -->`, and a
figure by `<!-- figure: NAME -->` directly behind it.
"""

import argparse
import json
import os
import re
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Any

from benchmarks import gains, kernels
from benchmarks.figures import FIGURES
from benchmarks.pages import TABLES
from benchmarks.record import RESULTS
from benchmarks.remarks import REMARKS
from benchmarks.summaries import SUMMARIES
from benchmarks.tables import markdown
from twell_jax.plotting import drawn

Record = dict[str, Any]

README = Path(__file__).parents[1] / "README.md"
DOCS = README.parent / "docs"
PAGES = DOCS / "results"
GAINS = PAGES / "gains.png"

_MADE = "<!-- `python -m benchmarks.render` makes this page from the records; do not edit it. -->"
FIGURE = re.compile(r"([+-]?\d[\d,]*(?:\.\d+)?(?:e-?\d+)?)?<!-- figure: ([\w.-]+) -->")
PLACE = re.compile(r"(<!-- table: (\w+) -->\n).*?(<!-- end of table -->)", re.DOTALL)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="*", type=Path, metavar="RECORD")
    parser.add_argument("--out", type=Path, help="a directory for pages and plots")
    args = parser.parse_args()
    records = load(args.records or RESULTS.glob("*.json"))
    for path, record in records.items():
        if record["benchmark"] not in TABLES:
            parser.error(f"{path}: no table shows {record['benchmark']!r}, only {list(TABLES)}")
    if args.records and not args.out:
        for record in records.values():
            print(TABLES[record["benchmark"]].render(record["rows"]))
        return
    if not args.records:
        kernels.write(kernels.with_today(kernels.versions()))
    out = args.out or PAGES
    out.mkdir(parents=True, exist_ok=True)
    for name, text in pages(records, out).items():
        (out / name).write_text(text)
        print(out / name)
    for path, record in records.items():
        for suffix, draw in _plots(record).items():
            with drawn(out / f"{path.stem}{suffix}.png", height=4.5) as figure:
                draw(figure, record)
    if not args.records:
        about = gains.description(records)
        with drawn(GAINS, description=about) as figure:
            gains.draw(figure, records)
        for path in filled_pages():
            path.write_text(filled(path, records))


def load(paths: Iterable[Path]) -> dict[Path, Record]:
    """The records by their path, the newest first; of the same day, the last of a name."""
    records = {path: json.loads(path.read_text()) for path in sorted(paths)}

    def age(path: Path) -> tuple[str, int]:
        of_day = re.search(r"-\d{8}-(\d+)$", path.stem)
        return records[path]["date"], int(of_day[1]) if of_day else 1

    return {path: records[path] for path in sorted(records, key=age, reverse=True)}


def pages(records: dict[Path, Record], out: Path) -> dict[str, str]:
    """The pages of these records by file name: one for each benchmark."""
    sections: dict[str, list[str]] = {}
    for path, record in records.items():
        sections.setdefault(record["benchmark"], []).append(section(path, record, out))
    return {
        f"{name}.md": "\n\n".join(
            [f"# {TABLES[name].title}", _MADE, TABLES[name].about, *sections[name]]
        )
        + "\n"
        for name in sorted(sections)
    }


def section(path: Path, record: Record, out: Path) -> str:
    """The section of a page for one record: its origin, remark, table and plots."""
    table = TABLES[record["benchmark"]]
    parts = [
        f"## {short_name(path)}, {record['device']}, {record['date']}",
        f"[{path.name}]({_link(path, out)}), {_origin(record)}.",
        *([REMARKS[path.stem]] if path.stem in REMARKS else []),
        table.render(record["rows"]),
    ]
    if notes := table.notes(record["rows"]):
        parts.append(notes)
    parts += [
        f"![{suffix.strip('-') or table.title}]({path.stem}{suffix}.png)"
        for suffix in _plots(record)
    ]
    return "\n\n".join(parts)


def _plots(record: Record) -> Mapping[str, Callable]:
    """What draws the plots of a record, by the suffixes of their names."""
    table = TABLES[record["benchmark"]]
    return table.plots if table.drawn(record["rows"]) else {}


def _kernels(record: Record) -> str:
    """How old the measured kernels are, in versions of their files."""
    match kernels.age(record, kernels.with_today(kernels.versions())):
        case None:
            return "kernels of no known version"
        case 0:
            return "today's kernels"
        case back:
            return f"kernels of {back} version{'s' if back > 1 else ''} ago"


def _origin(record: Record) -> str:
    """The commit, the versions of what was measured, and the command without `--out`."""
    commit = [f"commit {record['commit'][:7]}"] if record["commit"] else []
    commit += [_kernels(record)] if record["device"] != "cpu" else []
    versions = record["versions"]
    shown = [f"{name} {versions[name]}" for name in ("jax", "tokamax", "torch") if name in versions]
    command = re.sub(r" --out \S+", "", record["command"])
    command = re.sub(r"(\w+=\[)[^\]]{60,}\]", r"\1...]", command)
    return f"{', '.join(commit + shown)}: `{command}`"


def filled_pages() -> list[Path]:
    """The pages in which summaries and figures may stand."""
    return [README, *sorted(DOCS.glob("*.md"))]


def filled(path: Path, records: dict[Path, Record]) -> str:
    """The text of a page, with its summaries and figures made from all records, the newest first.

    Raises:
      ValueError: a figure has no value before its comment, or no entry.
    """

    def fill(place: re.Match) -> str:
        return f"{place[1]}\n{summary(place[2], records, path.parent)}\n\n{place[3]}"

    def figure(place: re.Match) -> str:
        before, name = place.groups()
        if before is None or name not in FIGURES:
            problem = "no entry in FIGURES" if before else "no number directly before it"
            raise ValueError(f"{path.name}: the figure {name} has {problem}")
        return f"{FIGURES[name].text(records)}<!-- figure: {name} -->"

    return FIGURE.sub(figure, PLACE.sub(fill, path.read_text()))


def summary(name: str, records: dict[Path, Record], directory: Path) -> str:
    """A summary as Markdown, with links for a page in `directory`."""
    columns, lines = SUMMARIES[name].columns, []
    for pick in SUMMARIES[name].picks:
        path, *rows = pick.find(records)
        source = f"[{short_name(path)}]({_link(path, directory)})"
        lines.append([*(cell(*rows) for cell in columns.values()), source])
    return markdown([*columns, "record"], lines)


def short_name(path: Path) -> str:
    """A record's name without device and date."""
    return path.stem.split("-nvidia")[0]


def _link(path: Path, directory: Path) -> str:
    return Path(os.path.relpath(path, directory)).as_posix()


if __name__ == "__main__":
    main()

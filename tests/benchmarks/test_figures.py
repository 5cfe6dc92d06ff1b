"""Figures in the prose of pages are those of records."""

import re
from pathlib import Path

import pytest

from benchmarks import quotes, render
from benchmarks.figures import FIGURES
from benchmarks.quotes import Figure
from benchmarks.summaries import Pick

PAGES = render.filled_pages()
MARK = r"<!-- figure: [\w.-]+ -->"
NUMBER = rf"(?<![\w.,-])\d[\d,]*(?:\.\d+)?(?:{MARK})?"
UNIT = r"(?:x\b|\s?%|\s(?:times|ms|s|J|kJ|mJ|GB/s|tokens/s|steps/s)\b)"
# One number, or several ("1, 2 and 3 ms"), with a unit; and what looks like a cross-entropy.
MEASURED = re.compile(
    rf"{NUMBER}(?:(?:,\s|\sto\s|\sand\s|\sor\s){NUMBER})*{UNIT}(?:<!-- given -->)?"
    rf"|(?<![\w.,-])\d\.\d{{3}}(?!\d|\.\d)(?:{MARK}|<!-- given -->)?"
)


def sentences(page: str) -> list[str]:
    """The prose of a page, without code, the targets of links and generated tables."""
    text = render.PLACE.sub("", page)
    text = re.sub(r"```.*?```|^    .*?$|`[^`]*`|\]\([^)]*\)", "", text, flags=re.DOTALL | re.M)
    blocks = re.split(r"\n\s*\n|\n(?=\s*(?:- |\d+\. |\|))", text)
    return [part for block in blocks for part in re.split(r"(?<=[.!?])\s+|\|", block)]


def unmarked(page: str) -> list[str]:
    """What looks measured and says neither its figure nor that it is given."""
    return [
        found[0]
        for sentence in sentences(page)
        if "working measurement" not in " ".join(sentence.split())
        for found in MEASURED.finditer(sentence)
        if re.search(NUMBER, re.sub(rf"[\d.,]+{MARK}", "", found[0])) and "given" not in found[0]
    ]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: path.name)
def test_what_looks_measured_names_its_record(path):
    """By a comment `figure: NAME`, `given` for what no record has, or "working measurement"."""
    assert unmarked(path.read_text()) == []


@pytest.mark.parametrize(
    "text, found",
    [
        ("It runs at 1.31x, or 12 % and 3.2 ms.", ["1.31x", "12 %", "3.2 ms"]),
        ("It is 1.31 times\nas fast; at 4 GB/s.", ["1.31 times", "4 GB/s"]),
        ("Its CE is 1.972.", ["1.972"]),
        ("All of 97<!-- figure: a --> to 100 % are right.", ["97<!-- figure: a --> to 100 %"]),
        ("All of 97<!-- figure: a --> to 99<!-- figure: b --> % are.", []),
        ("| 1.5<!-- figure: a --> times | 3 s |", ["3 s"]),
        ("At most 40 to 50 %<!-- given --> are kept. Then 3 %.", ["3 %"]),
        ("It takes 4 s (working\nmeasurement). Then 3 s.", ["3 s"]),
        ("- It takes 4 s (working measurement)\n- then 3 s", ["3 s"]),
        ("JAX 0.11.2 reads 16 x 512 of 5632, [arXiv 2603.23198](https://a.org/3%20s).", []),
        ("`1.31x` in code.\n\n    also 12 % here\n\n```\n3 ms\n```\n", []),
        ("<!-- table: forward -->\n\n| 2.16x |\n\n<!-- end of table -->", []),
    ],
)
def test_what_looks_measured(text, found):
    assert unmarked(text) == found


def test_every_figure_has_a_place():
    text = "".join(path.read_text() for path in PAGES)
    assert {name for _, name in render.FIGURE.findall(text)} == set(FIGURES)


def test_a_figure_is_written_before_its_comment(tmp_path, monkeypatch):
    monkeypatch.setitem(FIGURES, "speed", Figure(lambda records: 1234.5, "{:,}"))
    page = tmp_path / "page.md"
    for before in ("1.2", "1,000", "-3.2e-3", "+7"):
        page.write_text(f"It has **{before}<!-- figure: speed --> tokens/s**, twice.\n")
        assert render.filled(page, {}) == (
            "It has **1,234.5<!-- figure: speed --> tokens/s**, twice.\n"
        )
    for text, problem in (
        ("It has <!-- figure: speed --> tokens/s", "page.md: the figure speed has no number"),
        ("It has 1.2<!-- figure: sped --> tokens/s", "page.md: the figure sped has no entry"),
    ):
        page.write_text(text)
        with pytest.raises(ValueError, match=problem):
            render.filled(page, {})


def records(**rows):
    """Records by their paths, the newest first."""
    return {
        Path(f"{name.replace('_', '-')}.json"): {"benchmark": "inference", "rows": found}
        for name, found in rows.items()
    }


def times(batch, **ms):
    return [
        {"implementation": name.replace("_", ", "), "batch": batch, "ms": value}
        for name, value in ms.items()
    ]


NEWER = times(1, xla_relu=3.0, xla_silu=2.5, mosaic_relu=2.0, torch_silu=4.0)
OLDER = times(1, xla_relu=9.0, mosaic_relu=1.0) + times(8, torch_silu=6.0, mosaic_relu=4.0)
FOUND = records(a_cpu_20261122=NEWER, a_cpu_20261121=OLDER + times(32, mosaic_relu=1.0))


def test_a_speedup_is_over_the_fastest_baseline_of_the_newest_record():
    assert quotes.speedup("a-cpu", {"batch": 1}, "mosaic, relu")(FOUND) == 1.25
    assert quotes.speedup("a-cpu", {"batch": 8}, "mosaic, relu")(FOUND) == 1.5
    with pytest.raises(ValueError, match=r"a-cpu-20261121 has no baseline with .*32"):
        quotes.speedup("a-cpu", {"batch": 32}, "mosaic, relu")(FOUND)


def test_values_and_ratios_are_those_of_the_newest_record():
    relu = {"implementation": "xla, relu", "batch": 1}
    silu = {"implementation": "xla, silu"}
    assert quotes.value("a-cpu", relu, "ms")(FOUND) == 3.0
    assert quotes.value("a-cpu", relu, lambda row: 2 * row["ms"])(FOUND) == 6.0
    assert quotes.ratio("a-cpu", relu, silu, "ms")(FOUND) == 1.2  # whichever row comes first
    assert quotes.ratio("a-cpu", silu, relu, "ms")(FOUND) == 2.5 / 3
    assert quotes.percent(quotes.ratio("a-cpu", relu, silu, "ms"), over=1)(FOUND) == pytest.approx(
        20
    )


def test_extremes_leave_out_what_failed():
    failed = {"implementation": "tokamax", "batch": 1, "failed": "ImportError"}
    found = records(a_cpu_20261122=[*NEWER, failed])
    assert quotes.least("a-cpu", {"batch": 1}, "ms")(found) == 2.0
    assert quotes.total("a-cpu", {"batch": 1}, "ms")(found) == 11.5
    assert quotes.most("a-cpu", {"implementation": lambda name: "xla" in name}, "ms")(found) == 3.0
    assert quotes.speedup("a-cpu", {"batch": 1}, "mosaic, relu")(found) == 1.25


def test_an_older_record_tells_what_failed_in_a_newer_one():
    case = {"implementation": "mosaic, relu", "batch": 8}
    failed = [{**case, "failed": "RuntimeError: no such kernel"}]
    found = records(a_cpu_20261122=NEWER + failed, a_cpu_20261121=OLDER)
    assert Pick("a-cpu", case).find(found)[1] == OLDER[-1]
    assert quotes.value("a-cpu", case, "ms")(found) == 4.0
    assert quotes.most("a-cpu", case, "ms")(found) == 4.0
    with pytest.raises(ValueError, match=r"no record a-cpu has a row with"):
        quotes.value("a-cpu", case, "ms")(records(a_cpu_20261122=NEWER + failed))


def test_figures_are_written_as_their_form_says():
    assert Figure(lambda records: 1.256).text({}) == "1.26"
    assert Figure(lambda records: 0.0032, "{:.1e}").text({}) == "3.2e-3"

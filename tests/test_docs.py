"""The pages of docs: their tables are what the records say, their links lead somewhere."""

import json
import re
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.pages import TABLES
from benchmarks.record import RESULTS
from benchmarks.remarks import REMARKS
from benchmarks.summaries import SUMMARIES, Pick

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = {path: json.loads(path.read_text()) for path in sorted(RESULTS.glob("*.json"))}
MADE = render.pages(RECORDS, render.PAGES)
PAGES = (
    sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("design/*.md")) + sorted(DOCS.glob("results/*.md"))
)
CODE = re.compile(r"`((?:twell_jax|pallas_kernels|benchmarks|tests|configs)/[\w/]+\.(?:py|yaml))`")


def test_every_record_has_a_page_and_every_page_records():
    assert {record["benchmark"] for record in RECORDS.values()} <= set(TABLES)
    assert {path.name for path in render.PAGES.glob("*.md")} == set(MADE)
    assert {path.stem for path in RECORDS} >= set(REMARKS)


@pytest.mark.parametrize("name", MADE)
def test_a_page_of_results_is_what_render_makes_of_the_records(name):
    assert (render.PAGES / name).read_text() == MADE[name], "run: python -m benchmarks.render"


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_summaries_are_made_from_the_records(path):
    assert path.read_text() == render.with_summaries(path), "run: python -m benchmarks.render"


def test_performance_is_a_page_for_a_person():
    text = (DOCS / "performance.md").read_text()
    assert len(text) < 10_000
    names = re.findall(r"<!-- table: (\w+) -->", text)
    assert names == ["forward", "gradients", "models", "generation"]
    assert all(len(SUMMARIES[name].picks) <= 8 for name in names)


def test_a_pick_names_one_row():
    rows = [
        {"implementation": "xla", "nnz_mean": 29.04, "ms": 3},
        {"implementation": "unions", "nnz_mean": 29.04, "ms": 2},
        {"implementation": "unions", "nnz_mean": 60.0, "ms": 1},
    ]
    unions, xla = {"implementation": "unions"}, {"implementation": "xla"}
    ours, dense = Pick("a record", {**unions, "nnz_mean": 29.0}, xla).rows(rows)
    assert (ours["ms"], dense["ms"]) == (2, 3)
    for values in (unions, {**unions, "nnz_mean": 30.0}):
        with pytest.raises(ValueError, match=r"a record has [02] rows with"):
            Pick("a record", values, xla).rows(rows)
    with pytest.raises(ValueError, match=r"a record has no row with .*torch"):
        Pick("a record", {"ms": 1}, {"implementation": "torch"}).rows(rows)


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_to_files(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        if "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_files_of_code_that_a_page_names_exist(path):
    named = [name for name in CODE.findall(path.read_text()) if not name.endswith("name.py")]
    assert [name for name in named if not (DOCS.parent / name).exists()] == []

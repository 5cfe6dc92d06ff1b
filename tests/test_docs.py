"""The pages of docs: their tables are what the records say, their links lead somewhere."""

import importlib.util
import json
import re
from pathlib import Path

import pytest

from benchmarks import render
from benchmarks.pages import TABLES
from benchmarks.record import RESULTS
from benchmarks.remarks import REMARKS
from benchmarks.summaries import SUMMARIES, Pick
from twell_jax import config

DOCS = Path(__file__).parents[1] / "docs"
RECORDS = render.load(RESULTS.glob("*.json"))
MADE = render.pages(RECORDS, render.PAGES)
PAGES = (
    sorted(DOCS.glob("*.md")) + sorted(DOCS.glob("design/*.md")) + sorted(DOCS.glob("results/*.md"))
)
SITE = DOCS / "_build/html"
built = pytest.mark.skipif(not (SITE / "searchindex.js").exists(), reason="needs `make docs`")
CODE = re.compile(r"`((?:twell_jax|pallas_kernels|benchmarks|tests|configs)/[\w/]+\.(?:py|yaml))`")


def test_every_record_has_a_page_and_every_page_records():
    assert {record["benchmark"] for record in RECORDS.values()} <= set(TABLES)
    assert {path.name for path in render.PAGES.glob("*.md")} == set(MADE)
    assert {path.stem for path in RECORDS} >= set(REMARKS)


@pytest.mark.parametrize("name", MADE)
def test_a_page_of_results_is_what_render_makes_of_the_records(name):
    assert (render.PAGES / name).read_text() == MADE[name], "run: python -m benchmarks.render"


@pytest.mark.parametrize("path", render.filled_pages(), ids=lambda path: path.name)
def test_summaries_and_figures_are_made_from_the_records(path):
    assert path.read_text() == render.filled(path, RECORDS), "run: python -m benchmarks.render"


DATED = re.compile(r"/results/(([\w-]+?-)20\d{6}(?:-\d+)?)[\w-]*\.(?:json|png)")


@pytest.mark.parametrize("path", render.filled_pages(), ids=lambda path: path.name)
def test_pages_lead_to_the_newest_record(path):
    """In prose and plots; generated tables pick their records."""
    found = DATED.findall(render.PLACE.sub("", path.read_text()))
    for name in {name for _, name in found}:
        newest = next(other.stem for other in RECORDS if re.match(f"{name}20", other.name))
        assert {record for record, of in found if of == name} == {newest}


def test_performance_goes_from_the_block_to_whole_models():
    text = (DOCS / "performance.md").read_text()
    names = re.findall(r"<!-- table: (\w+) -->", text)
    assert names == ["forward", "gradients", "models", "generation"]


def test_every_summary_has_a_place():
    text = "".join(path.read_text() for path in DOCS.glob("*.md"))
    assert set(re.findall(r"<!-- table: (\w+) -->", text)) == set(SUMMARIES)


XLA, UNIONS = {"implementation": "xla"}, {"implementation": "mosaic", "packing": "unions"}
ROWS = [
    {**XLA, "nnz_mean": 29.04, "ms": 3},
    {**UNIONS, "nnz_mean": 29.04, "ms": 2},
    {**UNIONS, "nnz_mean": 60.0, "ms": 1},
]


def records_of(**rows):
    """Records of a card by their paths, the newest first."""
    return {
        Path(f"{day.replace('_', '-')}.json"): {"benchmark": "ffn", "rows": found}
        for day, found in rows.items()
    }


def test_a_pick_names_one_row():
    records = records_of(ffn_cpu_20261124=ROWS)
    path, ours, dense = Pick("ffn-cpu", {**UNIONS, "nnz_mean": 29.0}, XLA).find(records)
    assert (path.stem, ours["ms"], dense["ms"]) == ("ffn-cpu-20261124", 2, 3)
    with pytest.raises(ValueError, match=r"ffn-cpu-20261124 has 2 rows with"):
        Pick("ffn-cpu", UNIONS, XLA).find(records)
    for name, values in (("ffn-cpu", {**UNIONS, "nnz_mean": 30.0}), ("ffn", UNIONS)):
        with pytest.raises(ValueError, match=f"no record {name} has a row with"):
            Pick(name, values, XLA).find(records)
    with pytest.raises(ValueError, match=r"ffn-cpu-20261124 has no row with .*torch"):
        Pick("ffn-cpu", {"ms": 1}, {"implementation": "torch"}).find(records)


def test_a_pick_takes_the_newest_record_that_has_its_row():
    newest = [{**row, "ms": 10 * row["ms"]} for row in ROWS[:2]]
    records = records_of(ffn_cpu_20261126=newest, ffn_cpu_20261125=ROWS, ffn_cpu_20261124=ROWS)
    for nnz, day, ms in ((29.0, "20261126", 20), (60.0, "20261125", 1)):
        path, ours, _ = Pick("ffn-cpu", {**UNIONS, "nnz_mean": nnz}, XLA).find(records)
        assert (path.stem, ours["ms"]) == (f"ffn-cpu-{day}", ms)


def test_records_are_loaded_newest_first(tmp_path):
    names = {"a-20261125-2": "2026-11-25", "b-20261126": "2026-11-26", "a-20261125": "2026-11-25"}
    for name, day in {**names, "a-20261125-10": "2026-11-25"}.items():
        (tmp_path / f"{name}.json").write_text(f'{{"date": "{day}"}}')
    found = [path.stem for path in render.load(tmp_path.glob("*.json"))]
    assert found == ["b-20261126", "a-20261125-10", "a-20261125-2", "a-20261125"]


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_links_lead_to_files(path):
    text = re.sub(r"```.*?```", "", path.read_text(), flags=re.DOTALL)
    for target in re.findall(r"\]\(([^)\s#]+)", text):
        if target.startswith("api/"):  # the build makes a page for each package
            assert importlib.util.find_spec(Path(target).stem), target
        elif "://" not in target:
            assert (path.parent / target).exists(), target


@pytest.mark.parametrize("path", sorted(DOCS.glob("*.md")), ids=lambda path: path.name)
def test_files_of_code_that_a_page_names_exist(path):
    named = [name for name in CODE.findall(path.read_text()) if not name.endswith("name.py")]
    assert [name for name in named if not (DOCS.parent / name).exists()] == []


NAMED = re.compile(r"\b[a-z]\w*-[\w-]*(?:cpu|nvidia)[\w-]*-20\d{6}(?:-\d{1,2})?(?![\w-])")


@pytest.mark.parametrize("path", PAGES, ids=lambda path: str(path.relative_to(DOCS)))
def test_records_that_a_page_names_exist(path):
    records = {path.name.partition(".")[0] for path in RESULTS.iterdir()}
    assert {*NAMED.findall(path.read_text())} <= records


@built
@pytest.mark.parametrize(
    ("stem", "pages"),  # as the site's search cuts "resume", "install" and "bf16"
    [("resum", ["training", "tutorial"]), ("instal", ["install"]), ("bf16", ["training"])],
)
def test_the_search_of_the_site_finds_the_page(stem, pages):
    """Pages with the word in a heading come first, and these are few."""
    text = (SITE / "searchindex.js").read_text()
    index = json.loads(text.removeprefix("Search.setIndex(").removesuffix(")"))
    found = index["titleterms"][stem]
    numbers = [found] if isinstance(found, int) else found
    assert sorted(index["docnames"][i] for i in numbers) == pages


@built
def test_the_page_of_training_has_every_key():
    text = (SITE / "training.html").read_text()
    for key in config.to_yaml(config.load("tiny")).splitlines():
        if key[0] not in " -" and not key.endswith(":"):
            assert f">{key.partition(':')[0]}</span>" in text, key
    assert ">optimizer.lr</span>" in text and ">data.tokenizer</span>" in text


@built
def test_wide_tables_scroll_in_a_box_of_their_own():
    text = (SITE / "results/inference.html").read_text()
    boxes = re.findall(r'<div class="table-wrapper[^"]*container[^"]*">\s*<table', text)
    assert len(boxes) == text.count("<table") > 0
    style = (SITE / "_static/styles/furo.css").read_text()
    assert re.search(r"\.table-wrapper\.container\{[^}]*overflow-x:auto", style)


@built
def test_the_site_begins_with_what_a_newcomer_needs():
    text = (SITE / "index.html").read_text()
    places = [
        re.search(rf'toctree-l1[^>]*><a class="[^"]*" href="{page}.html"', text).start()
        for page in (
            "install", "tutorial", "training", "make-your-model-sparse", "how-it-works",
            "api/twell_jax", "performance",
        )
    ]  # fmt: skip
    assert places == sorted(places)
    folded = re.findall(r'<li class="toctree-l1 has-children"><a [^>]*href="([\w-]+)', text)
    assert folded == ["design-notes", "packages", "records"]

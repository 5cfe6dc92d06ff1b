"""What the README shows runs, and what it points to exists."""

import json
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
README = (ROOT / "README.md").read_text()
CODE = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def speedups(record: Path) -> set[float]:
    """Of each row, over dense XLA on as many devices, to two digits."""
    rows = json.loads(record.read_text())["rows"]
    if "speedup" in rows[0]:
        return {round(row["speedup"], 2) for row in rows}
    rates = {(r["implementation"], r["devices"], r["fsdp"]): r["tokens_per_second"] for r in rows}
    return {round(rate / rates["xla, relu", *mesh], 2) for (_, *mesh), rate in rates.items()}


def test_there_is_code():
    assert CODE


@pytest.mark.parametrize("code", CODE)
def test_the_code_runs(code):
    names = {}
    exec(compile(code, "README.md", "exec"), names)
    assert names["y"].shape == names["x"].shape
    assert names["stats"].l1 > 0


@pytest.mark.parametrize("page", ["README.md", "CONTRIBUTING.md", "CHANGELOG.md"])
def test_links_lead_to_files(page):
    targets = re.findall(r"\]\(([^)#]+)", (ROOT / page).read_text())
    targets = [target for target in targets if not target.startswith("http")]
    assert [target for target in targets if not (ROOT / target).exists()] == []


def test_figures_are_those_of_the_records():
    rows = re.findall(r"\| (1\.\d\d) times .*?\((benchmarks/results/[^)]+)\)", README)
    assert len(rows) == 3
    for figure, record in rows:
        assert float(figure) in speedups(ROOT / record)

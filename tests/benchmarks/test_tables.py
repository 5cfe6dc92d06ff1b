"""The tables of pages: what stands above them, and what shares a line."""

import re
import subprocess

import pytest

from benchmarks import record
from benchmarks.pages import TABLES
from benchmarks.summaries import Pick
from benchmarks.tables import Table, block, error, milliseconds, number

CASE = {"M": number("m"), "pattern": number("pattern")}
RESULTS = {"ms": milliseconds, "error": error("error")}


def row(m, implementation, ms, speedup=1.0, pattern="skewed", **more):
    found = {"m": m, "pattern": pattern, "implementation": implementation, "ms": ms}
    return {**found, "speedup": speedup, **more}


def test_what_all_lines_share_stands_above_them():
    table = Table("title", "about", CASE, RESULTS)
    rows = [row(1, "xla", 2.0, error=0.0031), row(2, "xla", 123.44, 0.5)]
    assert table.render(rows).splitlines() == [
        "All lines: pattern skewed.",
        "",
        "| M | ms | error |",
        "|---|---|---|",
        "| 1 | 2.000 | 3.1e-3 |",
        "| 2 | 123.4 (0.50x) | - |",
    ]
    assert table.render(rows[:1]).startswith("| M | pattern | ms | error |")  # one line has all


def test_rows_of_one_case_share_a_line_unless_that_is_wider_than_long():
    table = Table("title", "about", CASE, RESULTS, name=block)
    rows = [
        row(m, name, ms, 4 / ms, error=loss)
        for m in (1, 8)
        for name, ms, loss in (("xla", 4.0, 0.003), ("unions", 2.0, 0.003 if m == 1 else 0.002))
    ]
    assert table.render(rows).splitlines()[2:] == [
        "| M | xla | unions | error |",
        "|---|---|---|---|",
        "| 1 | 4.000 | 2.000 (2.00x) | 3.0e-3 |",  # the same for both
        "| 8 | 4.000 | 2.000 (2.00x) | 3.0e-3 / 2.0e-3 |",
    ]
    assert table.render(rows[:2]).splitlines()[2:] == [
        "| block | ms | error |",
        "|---|---|---|",
        "| xla | 4.000 | 3.0e-3 |",
        "| unions | 2.000 (2.00x) | 3.0e-3 |",
    ]


def test_a_case_that_is_measured_twice_has_two_lines():
    table = Table("title", "about", CASE, RESULTS, name=block)
    rows = [row(1, "xla", ms) for ms in (1.0, 2.0)]
    assert table.render(rows).splitlines()[-2:] == ["| 1.000 |", "| 2.000 |"]


def test_sparse_steps_are_compared_with_dense_ones_on_the_same_mesh():
    def step(implementation, devices, rate):
        mesh = {"config": "2b", "devices": devices, "fsdp": 1, "micro_batch": 4}
        return {**mesh, "implementation": implementation, "tokens_per_second": rate, "ms": 20.0}

    rows = [step("xla, relu", 1, 10), step("sparse, relu", 1, 15), step("sparse, relu", 2, 40)]
    lines = TABLES["training"].render(rows).splitlines()
    assert [line.split(" | ")[2] for line in lines[4:]] == ["20", "20 (1.50x)", "20"]


def test_of_the_tuning_the_fastest_is_named():
    tried = [("a", 0.3), ("b", 0.1), ("c", 0.2)]
    shape = {"kernel": "k", "m": 1, "d": 2, "h": 3}
    rows = [{**shape, "config": config, "ms": ms} for config, ms in tried]
    rows.insert(0, {**shape, "config": "d", "failed": "does not fit"})
    *_, line = TABLES["tune"].render(rows).splitlines()
    assert line == "| k | 1 | 2 | 3 | `b` | 0.100 | 0.300, 0.100, 0.200 |"


def test_of_several_baselines_the_last_one_before_ours_counts(tmp_path):
    rows = [row(8, name, ms) for name, ms in (("xla", 1.0), ("xla", 2.0), ("ours", 3.0))]
    records = {tmp_path / "ffn-x-20261126.json": {"benchmark": "ffn", "rows": rows}}
    pick = Pick("ffn-x", {"implementation": "ours", "m": 8}, {"implementation": "xla"})
    assert pick.find(records) == (*records, rows[2], rows[1])
    for others in (rows[2:], [*rows, *rows]):  # without a baseline, and with two of ours
        records = {tmp_path / "ffn-x-20261126.json": {"benchmark": "ffn", "rows": others}}
        with pytest.raises(ValueError, match=r"has (no row with .* before ours|2 rows with)"):
            pick.find(records)


def test_a_record_of_changed_files_says_so(tmp_path, monkeypatch):
    monkeypatch.delenv("COMMIT", raising=False)
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("as committed")
    as_someone = "-c", "user.name=a", "-c", "user.email=a@b"
    for command in (["init", "-q"], ["add", "."], [*as_someone, "commit", "-qm", "first"]):
        subprocess.run(["git", *command], check=True)
    committed = record.commit()
    assert re.fullmatch("[0-9a-f]{7,}", committed)
    (tmp_path / "file").write_text("changed")
    assert record.commit() == f"{committed}-dirty"


@pytest.mark.parametrize("name", TABLES)
def test_every_benchmark_has_a_heading_and_says_what_it_shows(name):
    assert TABLES[name].title and len(TABLES[name].about) > 50 and TABLES[name].results

"""Pages say how old the kernels of a record are, and every record's kernels are known."""

import re

import pytest

from benchmarks import kernels, render
from benchmarks.kernels import Version
from benchmarks.record import RESULTS

RECORDS = render.load(RESULTS.glob("*.json"))
OF_GPUS = [path for path, record in RECORDS.items() if record["device"] != "cpu"]


def test_the_last_version_is_that_of_the_kernels_that_are_here():
    assert kernels.versions()[-1].digest == kernels.of_today(), "run: python -m benchmarks.render"


@pytest.mark.parametrize("path", OF_GPUS, ids=lambda path: path.stem)
def test_the_kernels_of_a_record_are_known(path):
    assert not str(RECORDS[path]["commit"]).endswith("-dirty"), "measure again, at a commit"
    assert kernels.age(RECORDS[path], kernels.versions()) is not None, (
        f"{kernels.VERSIONS.name} needs the record's commit in the line of its kernels"
    )


def test_an_age_counts_versions_from_the_last_one():
    known = [Version("aa", "2026-11-21", ("1234567",)), Version("bb", "2026-11-22")]
    assert kernels.age({"commit": "1234567890"}, known) == 1
    assert kernels.age({"commit": "2345678"}, known) is None
    assert kernels.age({"commit": "1234567-dirty"}, known) is None
    assert kernels.age({"commit": "1234567", "kernels": "bb"}, known) == 0
    assert kernels.age({"commit": "1234567", "kernels": "cc"}, known) is None
    assert kernels.age({"commit": None, "kernels": "aa"}, [*known, known[0]]) == 0  # again today's


def test_a_digest_is_of_names_and_contents():
    files = {"a.py": b"1", "b.py": b"2"}
    others = {"a.py": b"2", "b.py": b"1"}, {"a.py": b"1", "c.py": b"2"}, {"a.py": b"1"}
    found = {kernels.digest(some) for some in (files, *others)}
    assert len(found) == 4
    assert all(re.fullmatch("[0-9a-f]{12}", digest) for digest in found)
    assert kernels.digest(dict(reversed(files.items()))) == kernels.digest(files)


def test_a_new_version_is_a_line_of_its_own(tmp_path, monkeypatch):
    (tmp_path / "hopper").mkdir()
    (tmp_path / "reference").mkdir()
    monkeypatch.setattr(kernels, "KERNELS", tmp_path)
    monkeypatch.setattr(kernels, "VERSIONS", tmp_path / "kernels.txt")
    kernels.write([])
    for file, is_new in (("hopper/a.py", True), ("reference/a.py", False), ("hopper/b.py", True)):
        (tmp_path / file).write_text("pass\n")
        before = kernels.versions()
        kernels.write(kernels.with_today(before))
        assert len(kernels.versions()) == len(before) + is_new
        assert kernels.versions()[-1].digest == kernels.of_today()


@pytest.mark.parametrize("age, says", [(0, "today's kernels"), (1, "kernels of 1 version ago")])
def test_a_section_says_how_old_the_kernels_are(age, says):
    record = {
        "benchmark": "ffn", "device": "NVIDIA abacus", "date": "2026-11-21", "commit": None,
        "kernels": kernels.versions()[-1 - age].digest, "versions": {}, "command": "", "rows": [],
    }  # fmt: skip
    assert f", {says}" in render.section(RESULTS / "a.json", record, RESULTS)

"""Where a package is missing, a test is skipped, or fails; one function decides."""

import json
from pathlib import Path

import pytest

from tests.packages import REQUIRED, needed

TESTS = Path(__file__).parent


def test_what_is_missing_is_an_error_where_packages_are_required(monkeypatch):
    for missing in (("no_such_package",), ("no_such_package.of_it",), ("pytest", "999")):
        monkeypatch.delenv(REQUIRED, raising=False)
        with pytest.raises(pytest.skip.Exception, match=missing[0]):
            needed(*missing)
        monkeypatch.setenv(REQUIRED, "1")
        with pytest.raises(ImportError, match=missing[0]):
            needed(*missing)
    assert needed("json") is json


def test_all_tests_ask_there():
    asking = [path for path in TESTS.rglob("*.py") if "importorskip" in path.read_text()]
    assert set(asking) == {TESTS / "packages.py", Path(__file__)}
    assert f"\ntest-all: export {REQUIRED} = 1" in (TESTS.parent / "Makefile").read_text()

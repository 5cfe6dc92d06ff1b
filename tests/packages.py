"""Packages that tests need and that not every environment has."""

import os
from types import ModuleType

import pytest

REQUIRED = "TWELL_TESTS_REQUIRE_PACKAGES"  # in the environment, `make test-all` sets it


def needed(name: str, minversion: str | None = None) -> ModuleType:
    """The module of this name. A test without it is skipped, or fails where `REQUIRED` is set."""
    try:
        return pytest.importorskip(name, minversion)
    except pytest.skip.Exception as missing:
        if os.environ.get(REQUIRED):
            raise ImportError(f"{missing.msg} ({REQUIRED} is set)") from None
        raise

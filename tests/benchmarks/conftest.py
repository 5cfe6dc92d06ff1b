import pytest

from benchmarks import variants
from tests.commands import succeeded


@pytest.fixture
def in_this_process(monkeypatch):
    """Commands that a benchmark starts run in this process."""

    def run(command, **options):
        succeeded(*command[1:])

    monkeypatch.setattr(variants.subprocess, "run", run)


@pytest.fixture
def text_settings(tmp_path):
    """Overrides of a configuration, for a small text with a cache of its own."""
    directory = tmp_path / "text"
    directory.mkdir()
    for i in range(40):
        (directory / f"{i}.txt").write_text(f"{i} words that no model needs to learn. " * 80)
    return [
        "data.source=files",
        f"data.paths=[{directory}/*.txt]",
        "data.held_out_fraction=0.3",
        f"data.cache_dir={tmp_path}/tokens",
    ]

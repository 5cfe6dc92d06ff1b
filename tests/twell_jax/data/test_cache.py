import logging
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from twell_jax.data import cache

# A builder in a process of its own: says that it started, writes half of the entry, says so, waits
# for a line on its standard input, writes the rest. Appends a line to `builds` for each build. It
# runs the file of the cache alone, as importing all of twell_jax takes seconds.
BUILDER = textwrap.dedent(
    """
    import runpy
    import sys
    from pathlib import Path

    root, entry = Path(sys.argv[1]), runpy.run_path(sys.argv[2])["entry"]

    def build(directory):
        with (root / "builds").open("a") as builds:
            builds.write("built\\n")
        (directory / "a").write_text("half")
        print("half", flush=True)
        sys.stdin.readline()
        (directory / "b").write_text("rest")

    print("started", flush=True)
    print("at", entry(root / "cache", {"corpus": 1}, build), flush=True)
    """
)


def start_builder(root):
    builder = subprocess.Popen(
        [sys.executable, "-c", BUILDER, str(root), cache.__file__],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert builder.stdout.readline() == "started\n"
    return builder


def build_both(directory):
    (directory / "a").write_text("half")
    (directory / "b").write_text("rest")


def must_not_build(directory):
    pytest.fail("built although the entry exists")


def contents(directory):
    return {path.name: path.read_text() for path in directory.iterdir() if path.name in "ab"}


def test_entry_is_built_once_per_key(tmp_path):
    first = cache.entry(tmp_path, {"corpus": 1}, build_both)
    assert contents(first) == {"a": "half", "b": "rest"}
    assert cache.entry(tmp_path, {"corpus": 1}, must_not_build) == first
    assert cache.entry(tmp_path, {"corpus": 2}, build_both) != first


@pytest.mark.parametrize(
    "damage", ["truncate", "another byte", "delete", "no manifest", "broken manifest", "older"]
)
def test_damaged_entry_is_built_again(tmp_path, caplog, damage):
    directory = cache.entry(tmp_path, {}, build_both)
    match damage:
        case "truncate":
            os.truncate(directory / "b", 2)
        case "another byte":
            (directory / "b").write_text("test")
        case "delete":
            (directory / "b").unlink()
        case "no manifest":
            (directory / "manifest.json").unlink()
        case "broken manifest":
            (directory / "manifest.json").write_text("{")
        case "older":  # which knew sizes only
            (directory / "manifest.json").write_text('{"a": 4, "b": 4}')
    with caplog.at_level(logging.WARNING):
        assert cache.entry(tmp_path, {}, build_both) == directory
    assert "damaged" in caplog.text
    assert contents(directory) == {"a": "half", "b": "rest"}
    assert cache.entry(tmp_path, {}, must_not_build) == directory


def test_a_whole_entry_is_only_read(tmp_path, monkeypatch):
    """As in a read-only directory; one of a test that runs as root could be written."""
    directory = cache.entry(tmp_path, {}, build_both)
    for path in (*tmp_path.glob("*.lock"), *tmp_path.glob("*/*.lock")):
        path.unlink()
    monkeypatch.setattr(cache.filelock, "FileLock", must_not_build)
    monkeypatch.setattr(pathlib.Path, "mkdir", must_not_build)
    assert cache.entry(tmp_path, {}, must_not_build) == directory


def test_failed_build_leaves_no_entry(tmp_path):
    def fail(directory):
        (directory / "a").write_text("half")
        raise RuntimeError("no more documents")

    with pytest.raises(RuntimeError, match="no more documents"):
        cache.entry(tmp_path, {}, fail)
    assert not [path for path in tmp_path.iterdir() if path.is_dir()]


def test_killed_build_is_neither_used_nor_kept(tmp_path):
    builder = start_builder(tmp_path)
    assert builder.stdout.readline() == "half\n"
    builder.send_signal(signal.SIGKILL)
    builder.communicate()
    cache_dir = tmp_path / "cache"
    assert [path for path in cache_dir.iterdir() if path.is_dir()]  # the remains
    directory = cache.entry(cache_dir, {"corpus": 1}, build_both)
    assert contents(directory) == {"a": "half", "b": "rest"}
    assert [path for path in cache_dir.iterdir() if path.is_dir()] == [directory]


def test_two_processes_build_once(tmp_path):
    builders = [start_builder(tmp_path), start_builder(tmp_path)]
    for builder in builders:  # only now, so that neither could finish before the other started
        builder.stdin.write("go\n")
        builder.stdin.close()
    outputs = [builder.stdout.read() for builder in builders]
    for builder in builders:
        builder.wait()
    assert all(builder.returncode == 0 for builder in builders)
    assert (tmp_path / "builds").read_text() == "built\n"
    one, other = (output.splitlines()[-1] for output in outputs)
    assert one == other
    assert one.startswith("at ")

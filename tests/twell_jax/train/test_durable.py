"""Files outlast kills and power cuts: what has the new name is on the disk, whole."""

import os
from pathlib import Path

import pytest

from tests.twell_jax.train.saved import make_state
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.checkpoint_errors import CannotSave
from twell_jax.train.durable import write_atomically
from twell_jax.train.metrics import Log


@pytest.fixture
def synced(monkeypatch):
    """The paths that were brought to the disk, in order."""
    paths, fsync = [], os.fsync

    def noted(descriptor):
        paths.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", noted)
    return paths


def test_writing_that_is_cut_short_leaves_the_old_file(tmp_path):
    path = tmp_path / "file.txt"
    write_atomically(path, "old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "new \ud800")
    assert path.read_text() == "old"
    write_atomically(path, "new")
    assert {file.name: file.read_text() for file in tmp_path.iterdir()} == {"file.txt": "new"}


def test_a_file_is_on_the_disk_before_it_has_its_name(tmp_path, synced, monkeypatch):
    replace = Path.replace
    monkeypatch.setattr(Path, "replace", lambda a, b: (synced.append("renamed"), replace(a, b)))
    write_atomically(tmp_path / "file.txt", "new")
    assert synced == [tmp_path / "file.txt.tmp", "renamed", tmp_path]


def test_metrics_are_on_the_disk_before_the_checkpoint_after_them(tmp_path, synced):
    with Log(tmp_path / "metrics.jsonl", 0) as log:
        log.write({"step": 1, "held_out_ce": 1.5})
        synced.clear()
        log.sync()
    assert synced == [tmp_path / "metrics.jsonl"]


def test_a_checkpoint_is_on_the_disk_before_the_next_is_begun_and_at_the_end(tmp_path, synced):
    def on_the_disk(step):
        files = set((tmp_path / str(step)).rglob("*"))
        return {tmp_path, tmp_path / str(step), *files} <= set(synced)

    with Checkpoints(tmp_path, keep=1) as checkpoints:
        checkpoints.save(1, make_state(1), {})
        checkpoints._manager.wait_until_finished()
        assert not on_the_disk(1)
        save = checkpoints._manager.save

        def save_after(step, **options):
            assert on_the_disk(step - 1)
            return save(step, **options)

        checkpoints._manager.save = save_after
        checkpoints.save(2, make_state(2), {})
    assert on_the_disk(2)


def test_a_disk_that_refuses_is_named(tmp_path, monkeypatch):
    def refuse(_):
        raise OSError(5, "Input/output error")

    with (
        pytest.raises(CannotSave, match=r"a checkpoint cannot be written: OSError: .*Input/output"),
        Checkpoints(tmp_path, keep=1) as checkpoints,
    ):
        checkpoints.save(1, make_state(1), {})
        checkpoints._manager.wait_until_finished()
        monkeypatch.setattr(os, "fsync", refuse)

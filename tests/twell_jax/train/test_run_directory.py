"""The run directory: joined only by the run that it belongs to, and whole after any kill."""

import errno
import re
import shutil
from pathlib import Path

import pytest
import yaml

from tests.twell_jax.configs import VALID
from tests.twell_jax.train.saved import abstract, assert_is_step, make_state, save
from twell_jax import config
from twell_jax.config import ConfigError
from twell_jax.train import run_directory
from twell_jax.train.checkpoint_errors import CannotSave, CheckpointError
from twell_jax.train.run_directory import (
    RunPaths,
    differences,
    keep_settings,
    load_config,
    lock_run,
    open_checkpoints,
    open_run,
)


def settings(directory, **changes):
    return config.from_dict(VALID | {"run_dir": str(directory)} | changes)


def begin(directory):
    """A run with a checkpoint."""
    run = settings(directory)
    paths = open_run(run)
    (paths.checkpoints / "10").mkdir(parents=True)
    return run


def test_a_new_directory_gets_the_configuration(tmp_path):
    run = settings(tmp_path / "a/b")
    assert open_run(run).directory == tmp_path / "a/b"
    assert load_config(tmp_path / "a/b") == run


def test_what_does_not_change_the_result_may_change(tmp_path):
    begin(tmp_path)
    changed = settings(tmp_path, steps=200, micro_batch=1, mesh={"fsdp": 2}, log_every=1)
    before = load_config(tmp_path)
    paths = open_run(changed)
    assert load_config(tmp_path) == before  # what comes next may refuse what has changed
    keep_settings(paths, changed)
    assert load_config(tmp_path) == changed


def test_a_run_of_0_1_that_planned_its_gradients_with_xla_is_still_read(tmp_path):
    run = begin(tmp_path)
    tree = run.model_dump(mode="json") | {"sparse_gradients_every": 5}
    del tree["model"]["ffn_gradients"]  # a key that did not exist yet
    tree["model"]["ffn_implementation"] = "xla"
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert load_config(tmp_path).model.ffn_implementation is None
    open_run(settings(tmp_path, sparse_gradients_every=5))


def test_a_run_of_0_2_that_set_the_capacity_of_its_gradients_is_still_read(tmp_path):
    run = begin(tmp_path)
    tree = run.model_dump(mode="json")
    tree["model"]["ffn_gradient_capacity"] = 0.5
    (tmp_path / "config.yaml").write_text(yaml.safe_dump(tree))
    assert load_config(tmp_path) == run


@pytest.mark.parametrize(
    ("key", "changes"),
    [
        ("seed", {"seed": 1}),
        ("batch_tokens", {"batch_tokens": 512}),
        ("l1_warmup", {"l1_warmup": [0, 5]}),
        ("optimizer.lr", {"optimizer": {"lr": 0.5}}),
        ("data.tokenizer", {"data": {"tokenizer": "bpe"}}),
    ],
)
def test_what_changes_the_result_is_refused(tmp_path, key, changes):
    run = begin(tmp_path)
    with pytest.raises(ConfigError, match=rf"^{key}: the run in .* was started with .*, now "):
        open_run(settings(tmp_path, **changes))
    assert load_config(tmp_path) == run


def test_without_a_checkpoint_there_is_nothing_to_continue(tmp_path):
    open_run(settings(tmp_path))
    changed = settings(tmp_path, seed=1)
    open_run(changed)
    assert load_config(tmp_path) == changed


def test_checkpoints_are_those_of_the_run_since_it_began(tmp_path):
    first, again, other = tmp_path / "first", tmp_path / "again", tmp_path / "other"
    ids = {open_run(settings(path)).id.read_text() for path in (first, again, other)}
    ids.add(open_run(settings(again)).id.read_text())  # without a checkpoint it begins anew
    assert len(ids) == 4

    run, paths = begin(first), open_run(settings(first, steps=200))
    shutil.rmtree(paths.checkpoints)
    save(paths.checkpoints, 3, run=paths.id.read_text().strip())
    with open_checkpoints(paths, run) as checkpoints:
        checkpoints.restore(abstract(make_state(0)))
        checkpoints.save(6, make_state(6), {"next_index": 6})
    open_run(run)
    with open_checkpoints(paths, run) as checkpoints:
        assert_is_step(checkpoints.restore(abstract(make_state(0))), 6)

    shutil.copytree(paths.checkpoints, other / "checkpoints")
    with (
        open_checkpoints(RunPaths(other), run) as checkpoints,
        pytest.raises(CheckpointError, match=r"step 6: .*another run saved it.* step 3: "),
    ):
        checkpoints.restore(abstract(make_state(0)))
    (other / "id").unlink()  # as an older version left it
    open_run(settings(other))
    with open_checkpoints(RunPaths(other), run) as checkpoints:
        assert_is_step(checkpoints.restore(abstract(make_state(0))), 6)


@pytest.mark.parametrize("text", ["font: serif", "[1, 2", ""])
def test_a_foreign_config_file_is_not_overwritten(tmp_path, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(ConfigError, match=r"^run_dir: .* is not the directory of a run \(.*\)$"):
        open_run(settings(tmp_path))
    assert (tmp_path / "config.yaml").read_text() == text


def test_a_file_is_not_a_run_directory(tmp_path):
    file = tmp_path / "file"
    file.write_text("text")
    with pytest.raises(ConfigError, match=r"^run_dir: .*file is not the directory of a run"):
        open_run(settings(file))
    assert file.read_text() == "text"


def test_a_directory_without_a_run_is_named(tmp_path):
    with pytest.raises(ConfigError, match=r"^run_dir: .*nothing is not .*No such file"):
        load_config(tmp_path / "nothing")


def test_a_run_has_one_process(tmp_path, monkeypatch):
    (tmp_path / "link").symlink_to(tmp_path / "a")  # to a directory that is not there yet
    (tmp_path / "b").mkdir()
    monkeypatch.chdir(tmp_path / "b")
    paths = tmp_path / "a", tmp_path / "link", Path("../a"), Path("../link/../b/../a")
    for path in paths:
        with lock_run(path):
            for other in paths:
                with pytest.raises(
                    ConfigError, match=r"another process is training in .*(a|link)$"
                ):
                    lock_run(other).__enter__()
            with lock_run(tmp_path / "b"):
                pass
    assert {path.name for path in tmp_path.rglob("*")} == {"a", "b", "link"}


def test_a_run_whose_directory_is_moved_saves_nothing_in_its_place(tmp_path):
    path, moved = tmp_path / "run", tmp_path / "moved"
    gone = r"^run_dir: .*run is no longer the directory in which this run began; nothing is saved"
    with lock_run(path) as require_in_place:
        require_in_place()
        path.rename(moved)
        with pytest.raises(CannotSave, match=gone):
            require_in_place()
        with lock_run(path) as of_another:
            of_another()
            with pytest.raises(CannotSave, match=gone):
                require_in_place()
        path.rmdir()
        path.symlink_to(moved)
        require_in_place()


def test_a_run_saves_nothing_where_its_link_leads_elsewhere(tmp_path):
    link = tmp_path / "link"
    link.symlink_to(tmp_path / "run")
    with lock_run(link) as require_in_place:
        require_in_place()
        (tmp_path / "other").mkdir()
        link.unlink()
        link.symlink_to(tmp_path / "other")
        with pytest.raises(CannotSave, match=r"link is no longer the directory in which this run"):
            require_in_place()


def test_a_path_that_cannot_be_a_run_directory_is_named(tmp_path, monkeypatch):
    (tmp_path / "file").write_text("text")
    (tmp_path / "loop").symlink_to(tmp_path / "loop")
    for path in (tmp_path / "file", tmp_path / "file/run", tmp_path / "loop", Path("/proc/run")):
        with pytest.raises(
            ConfigError, match=rf"^run_dir: {path} cannot be created or opened \(.*\); choose"
        ):
            lock_run(path).__enter__()
    assert (tmp_path / "file").read_text() == "text"

    def refuse(path, text):
        raise PermissionError(errno.EACCES, "Permission denied", path)

    monkeypatch.setattr(run_directory, "write_atomically", refuse)
    with pytest.raises(ConfigError, match=r"^run_dir: .*run cannot be written \(Permission denied"):
        open_run(settings(tmp_path / "run"))


def test_a_section_that_was_null_is_a_difference():
    found = differences({"rope_scaling": None}, {"rope_scaling": {"type": "linear"}})
    assert [*found] == [("rope_scaling", None, {"type": "linear"})]


@pytest.mark.parametrize("name", ["lr[1e-3]", "a*b", "what?", "back\\slash"])
def test_a_path_from_which_no_checkpoint_could_be_restored_is_refused(tmp_path, monkeypatch, name):
    directory = tmp_path / name
    wrong = next(character for character in name if character in "*?[\\")
    says = re.escape(f"run_dir: {directory}/run has {wrong}, with which no checkpoint could")
    with pytest.raises(ConfigError, match=f"^{says}"):
        lock_run(directory / "run").__enter__()
    assert not directory.exists()
    directory.mkdir()
    monkeypatch.chdir(directory)  # also if it is above
    with pytest.raises(ConfigError, match=f"^{says}"):
        lock_run("run").__enter__()
    (tmp_path / "link").symlink_to(directory)
    with lock_run(tmp_path / "link"):
        pass

"""A checkpoint is what its place says: of the step that names it, and of the run that has it."""

import logging
import shutil

import pytest

from tests.twell_jax.train.saved import (
    abstract,
    assert_is_step,
    assert_same,
    contents,
    continue_to,
    make_state,
    restore,
    save,
)
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.checkpoint_errors import CannotSave, CheckpointError


@pytest.fixture(scope="module")
def two_steps(tmp_path_factory):
    directory = tmp_path_factory.mktemp("checkpoints") / "two"
    save(directory, 3, 6)
    return directory


@pytest.fixture
def directory(two_steps, tmp_path):
    """A copy of a directory with checkpoints of step 3 and 6, to be renamed."""
    return shutil.copytree(two_steps, tmp_path / "checkpoints")


@pytest.mark.parametrize("version", ["with digests", "without"])
def test_under_another_steps_name_it_is_set_aside_and_the_run_saves_on(directory, version, caplog):
    if version == "without":
        shutil.rmtree(directory / "6/digests")
    renamed = (directory / "6").rename(directory / "100")
    before = contents(renamed)
    with caplog.at_level(logging.WARNING):
        assert_is_step(restore(directory), 3)
    assert "step 100: CheckpointError: it holds step 6, so it must be named 6" in caplog.text
    continue_to(directory, 4)
    assert_is_step(restore(directory), 4)
    assert contents(directory / "100.broken") == before


def test_under_another_steps_name_no_part_is_restored(directory):
    (directory / "6").rename(directory / "100")
    with Checkpoints(directory, keep=3) as checkpoints:
        assert_same(
            checkpoints.restore_params(abstract(make_state(0).params)), make_state(3).params
        )
        assert checkpoints.restore_position() == {"next_index": 3}


def test_a_save_that_did_not_happen_is_an_error(directory):
    before = contents(directory)
    with (
        Checkpoints(directory, keep=3) as checkpoints,
        pytest.raises(CannotSave, match=r"step 5 is not saved beside step 6; move that elsewhere"),
    ):
        checkpoints.save(5, make_state(5), {})
    assert contents(directory) == before


@pytest.mark.parametrize("names", ["s3 s6", "3.broken 6.broken"])
def test_without_a_known_name_nothing_begins_anew(directory, names):
    for step, name in zip((3, 6), names.split(), strict=True):
        (directory / str(step)).rename(directory / name)
    with pytest.raises(CheckpointError, match=f"here are {', '.join(names.split())}; rename them"):
        restore(directory)


def test_what_a_killed_first_write_left_is_no_checkpoint(directory):
    for step in (3, 6):
        (directory / str(step)).rename(directory / f"{step}.orbax-checkpoint-tmp")
    assert restore(directory) is None


@pytest.fixture(scope="module")
def of_two_runs(tmp_path_factory):
    """The checkpoints of one run, among which the newest is of another."""
    directory = tmp_path_factory.mktemp("checkpoints") / "one"
    save(directory, 3, run="one")
    save(directory.with_name("other"), 6, run="other")
    shutil.copytree(directory.with_name("other") / "6", directory / "6")
    return directory


def test_a_checkpoint_of_another_run_is_not_restored(of_two_runs, caplog):
    with caplog.at_level(logging.WARNING):
        assert_is_step(restore(of_two_runs, run="one"), 3)
    assert "step 6: CheckpointError: another run saved it" in caplog.text
    with Checkpoints(of_two_runs, keep=3, run="one") as checkpoints:
        assert checkpoints.restore_position() == {"next_index": 3}
    with pytest.raises(CheckpointError, match=r"no checkpoint is whole.*step 6.*step 3: .*another"):
        restore(of_two_runs, run="a third")


def test_a_run_or_a_checkpoint_of_an_older_version_has_no_id(of_two_runs, directory, caplog):
    assert_is_step(restore(of_two_runs), 6)
    assert_is_step(restore(directory, run="one"), 6)
    assert not caplog.records

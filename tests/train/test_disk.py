"""A disk that fails a run costs one line on the terminal, and no checkpoint that was whole."""

import resource
import shutil

import orbax.checkpoint as ocp
import pytest

from tests.commands import call


def train(workspace, run_dir):
    settings = "steps=10", "checkpoint_every=5", f"run_dir={run_dir}"
    return call("train.py", workspace / "config.yaml", *settings)


@pytest.fixture(scope="module")
def finished(workspace):
    """A run with checkpoints of steps 5 and 10."""
    process = train(workspace, workspace / "ten steps")
    assert process.returncode == 0, process.stderr
    return workspace / "ten steps"


def test_a_full_disk_is_one_line_and_the_run_continues(workspace, finished, tmp_path, monkeypatch):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / "10")
    save, (soft, hard) = ocp.CheckpointManager.save, resource.getrlimit(resource.RLIMIT_FSIZE)

    def fill_disk_and_save(*arguments, **options):
        resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))  # less than the arrays
        return save(*arguments, **options)

    with monkeypatch.context() as patch:
        patch.setattr(ocp.CheckpointManager, "save", fill_disk_and_save)
        try:
            process = train(workspace, run_dir)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert process.returncode == 1
    assert process.stderr == (
        f"error: {checkpoints}: a checkpoint cannot be written: File too large; "
        f"{checkpoints / '5'} is whole, and the same command continues from it; "
        f"details: {run_dir / 'log.txt'}\n"
    )
    assert "Traceback" in (run_dir / "log.txt").read_text()

    process = train(workspace, run_dir)
    assert process.returncode == 0, process.stderr
    assert process.stdout.startswith(f"continuing {run_dir} at step 5")
    digests = "checkpoints/10/digests/metadata"
    assert (run_dir / digests).read_text() == (finished / digests).read_text()


def test_corrupt_manifests_are_one_line(workspace, finished, tmp_path, capfd):
    run_dir = shutil.copytree(finished, tmp_path / "run")
    for path in run_dir.glob("checkpoints/*/state/manifest.ocdbt"):
        path.write_bytes(path.read_bytes()[:-1])
    trained = train(workspace, run_dir)
    assert trained.returncode == 3
    assert "Traceback" in (run_dir / "log.txt").read_text()
    generated = call("-m", "twell_jax.generate", run_dir, "--prompt", "a")
    assert generated.returncode == 1
    for process in (trained, generated):
        assert process.stderr.startswith(
            f"error: {run_dir / 'checkpoints'}: no checkpoint is whole"
        )
        assert process.stderr.endswith(f"; details: {run_dir / 'log.txt'}\n")
        assert process.stderr.count("\n") == 1
    assert capfd.readouterr().err == ""  # not even from threads

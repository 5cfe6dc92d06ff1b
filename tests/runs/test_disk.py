"""A disk or an output that fails costs one line on the terminal, and no whole checkpoint."""

import resource
import shutil
from pathlib import Path

import orbax.checkpoint as ocp
import pytest

from tests.commands import call, succeeded
from tests.runs.started import final_state, start


def train(workspace, run_dir):
    return call("train.py", workspace / "config.yaml", f"run_dir={run_dir}")


@pytest.fixture
def run_dir(workspace, uninterrupted, tmp_path):
    """A copy of a finished run, with checkpoints of steps 40, 50 and 60."""
    return shutil.copytree(workspace / "run", tmp_path / "run")


@pytest.mark.slow
def test_a_full_disk_is_one_line_and_the_run_continues(workspace, run_dir, monkeypatch):
    checkpoints = run_dir / "checkpoints"
    shutil.rmtree(checkpoints / "60")
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
        f"{checkpoints / '50'} is whole, and the same command continues from it; "
        f"details: {run_dir / 'log.txt'}\n"
    )
    assert "Traceback" in (run_dir / "log.txt").read_text()

    process = succeeded("train.py", workspace / "config.yaml", f"run_dir={run_dir}")
    assert process.stdout.startswith(f"continuing {run_dir} at step 50")
    digests = "checkpoints/60/digests/metadata"
    assert (run_dir / digests).read_text() == (workspace / "run" / digests).read_text()


def test_corrupt_manifests_are_one_line(workspace, run_dir, capfd):
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


@pytest.mark.slow
def test_a_run_whose_output_is_closed_goes_on(workspace, tmp_path):
    process = start(workspace, f"run_dir={tmp_path / 'run'}", "steps=12", "log_every=1")
    process.stdout.readline()
    process.stdout.close()  # as `| head -1` does
    with process.stderr as errors:
        text = errors.read()
    assert process.wait(timeout=120) == 0, text
    assert text.count("standard output cannot be written (Broken pipe); the run goes on") == 1
    final_state(tmp_path / "run", 12)


@pytest.mark.slow
def test_no_file_of_a_run_is_written_in_place(workspace, run_dir, monkeypatch):
    write, written = Path.write_text, []
    monkeypatch.setattr(
        Path, "write_text", lambda path, *text, **how: [written.append(path), write(path, *text)][1]
    )
    succeeded("train.py", workspace / "config.yaml", f"run_dir={run_dir}")
    names = {path.name for path in written if path.parent == run_dir}
    assert names == {"config.yaml.tmp", "tokenizer.json.tmp", "metrics.jsonl.tmp", "report.md.tmp"}

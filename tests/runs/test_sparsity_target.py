"""A run with a sparsity target: it is met, shown, and continued to the bit."""

import numpy as np
import pytest

from tests import figures
from tests.commands import call, succeeded
from tests.runs.started import final_state, records, stopped_at

pytestmark = pytest.mark.slow

STEPS, TARGET = 300, 16


def settings(workspace, run_dir, *changes):
    return [
        workspace / "config.yaml", f"run_dir={run_dir}", f"steps={STEPS}", "reinit_every=0",
        f"sparsity_target={TARGET}", "log_every=1", "eval_every=150", "checkpoint_every=1000",
        *changes,
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(workspace):
    """The directory of a run and what it printed."""
    directory = workspace / "targeted"
    return directory, succeeded("train.py", *settings(workspace, directory)).stdout


def test_the_target_is_reached_within_a_tenth_and_held(run):
    steps = [line for line in records(run[0]) if "ce" in line]
    nnz = np.mean([line["nnz"] for line in steps], axis=1).reshape(-1, 30).mean(1)
    assert nnz[0] > 1.2 * TARGET
    np.testing.assert_allclose(nnz[-4:], TARGET, rtol=0.1)
    assert steps[-1]["ce"] < 0.2 * steps[0]["ce"]


def test_lines_records_and_plots_show_target_and_coefficient(run):
    directory, text = run
    last = [line for line in records(directory) if "ce" in line][-1]
    assert last["sparsity_target"] == TARGET
    assert len(last["l1_multipliers"]) == 2 and last["l1_multipliers"][0] != 1
    assert f"  nnz {np.mean(last['nnz']):.1f} -> {TARGET}  " in text
    assert f"  L1 coefficient {last['l1_coefficient']:.2e}\n" in text
    assert "L1 multiplier" in text
    with figures.seen() as drawn:
        succeeded("-m", "twell_jax.plot", directory)
    _, nnz, *_, coefficient, _ = drawn[0].axes
    assert f"target {TARGET} non-zeros" in drawn[0].get_suptitle()
    assert f"target {TARGET}" in [text.get_text() for text in nnz.get_legend().get_texts()]
    curve = coefficient.get_lines()[0].get_ydata()
    assert len(curve) == STEPS and curve[-1] == last["l1_coefficient"]


def test_a_run_that_was_stopped_ends_with_the_same_bits(run, workspace):
    directory = workspace / "targeted-in-parts"
    with stopped_at(77):
        succeeded("train.py", *settings(workspace, directory))
    assert len([line for line in records(directory) if "ce" in line]) == 77
    succeeded("train.py", *settings(workspace, directory))
    assert records(directory) == records(run[0])
    state, _ = final_state(directory, STEPS)
    assert state == final_state(run[0], STEPS)[0]


def test_a_run_with_another_target_is_refused(run, workspace):
    refused = call("train.py", *settings(workspace, run[0], "sparsity_target=9"))
    assert refused.returncode == 3
    assert refused.stderr.startswith("error: sparsity_target: the run in")

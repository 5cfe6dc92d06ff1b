"""A run that skips dead neurons: they are shown, and it is continued to the bit."""

import numpy as np
import pytest

from tests import figures
from tests.commands import succeeded
from tests.runs.started import final_state, records, stopped_at

pytestmark = pytest.mark.slow

STEPS, D_FF = 24, 384


def settings(workspace, run_dir):
    """Its L1 term kills most neurons, and every seventh step draws gates anew."""
    return [
        workspace / "config.yaml", f"run_dir={run_dir}", f"steps={STEPS}", f"model.d_ff={D_FF}",
        "skip_dead_every=4", "reinit_every=7", "union_target=0.4", "micro_batch=8",
        "l1_coefficient=1", "l1_warmup=[0, 0]", "optimizer.lr=0.03", "log_every=1",
        "eval_every=1000", "checkpoint_every=1000",
    ]  # fmt: skip


@pytest.fixture(scope="module")
def run(workspace):
    """The directory of a run and what it printed."""
    directory = workspace / "skipping"
    return directory, succeeded("train.py", *settings(workspace, directory)).stdout


def test_lines_records_and_plots_show_what_is_computed_and_missed(run):
    directory, text = run
    steps = [line for line in records(directory) if "ce" in line]
    live, missed = (np.array([line[name] for line in steps]) for name in ("live", "missed"))
    full = (np.arange(STEPS) % 4 == 0) | (np.arange(STEPS) % 7 == 0)
    assert (live[full] == D_FF).all() and (live[-1] < D_FF).all()
    assert set(live[~full].flat) <= {0, 128, 256, 384}
    assert (missed[~full] == missed[np.flatnonzero(~full) - 1]).all()
    last = f"live {live[-1].mean() / D_FF:.1%}  missed {missed[-1].mean() / D_FF:.2%}"
    assert f"  {last}\n" in text
    with figures.seen() as drawn:
        succeeded("-m", "twell_jax.plot", directory)
    shown = [text.get_text() for text in drawn[0].axes[1].get_legend().get_texts()]
    assert f"computed, mean, last {live[-1].mean():.0f}" in shown


def test_a_run_that_was_stopped_while_it_skips_ends_with_the_same_bits(run, workspace):
    directory = workspace / "skipping-in-parts"
    with stopped_at(14):
        succeeded("train.py", *settings(workspace, directory))
    assert (np.array(records(directory)[-1]["live"]) < D_FF).any()
    succeeded("train.py", *settings(workspace, directory))
    assert records(directory) == records(run[0])
    assert final_state(directory, STEPS)[0] == final_state(run[0], STEPS)[0]

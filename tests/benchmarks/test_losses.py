"""benchmarks.losses: variants of a run are trained, compared and drawn."""

import json

import numpy as np
import pytest

from benchmarks import losses, render
from tests import seeds
from tests.small_run import SETTINGS


def test_differences_are_those_of_means_over_logged_steps():
    ce = seeds.rng().normal(size=30)
    found = losses.differences(list(ce + 0.5 * (-1.0) ** np.arange(30) + 0.1), list(ce))
    np.testing.assert_allclose(found["difference"], [0.1] * 21)  # what alternates averages out
    assert found["mean_difference"] == pytest.approx(0.1)
    found = losses.differences([1.0, 2.0, 6.0], [1.0, 3.0, 1.0])  # fewer than there are to average
    assert found["largest_difference"] == pytest.approx(4 / 3)


@pytest.mark.slow
def test_all_variants_follow_the_dense_one(
    tmp_path, monkeypatch, capsys, text_settings, reference_kernels, in_this_process
):
    small = [*SETTINGS, f"run_dir={tmp_path}/runs", "log_every=1", *text_settings]
    monkeypatch.setattr("sys.argv", ["losses", str(losses.BASE), *small, "--out", str(tmp_path)])
    losses.main()
    (path,) = tmp_path.glob("losses-*.json")
    rows = json.loads(path.read_text())["rows"]
    dense, micro, sparse, chosen = rows
    assert dense["largest_difference"] == 0 and chosen["largest_difference"] < 0.01
    assert 0 < micro["largest_difference"] < 0.01 and 0 < sparse["largest_difference"] < 0.01
    assert all(row["step"] == [1, 2, 3] for row in rows)
    assert np.all(sparse["chosen"]) and not np.any(chosen["chosen"]) and not np.any(dense["chosen"])
    assert np.shape(sparse["nnz"]) == np.shape(sparse["overflow"]) == (3, 2)

    monkeypatch.setattr("sys.argv", ["render", str(path)])
    capsys.readouterr()
    render.main()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 + 4
    assert lines[2].startswith("| dense |") and lines[2].endswith("| 0% | 0% |")
    assert lines[4].startswith("| sparse gradients |") and lines[4].endswith("| 100% | 100% |")
    monkeypatch.setattr("sys.argv", ["render", str(path), "--out", str(tmp_path)])
    render.main()
    assert path.with_suffix(".png").read_bytes().startswith(b"\x89PNG")

"""benchmarks.lasso: variants of a run are trained, analysed and shown."""

import json

import numpy as np
import pytest

from benchmarks import lasso, render
from tests.small_run import SETTINGS


def test_layers_are_averaged_and_runs_differ_in_the_penalty_alone():
    found = lasso.summarise(
        {
            "held_out_ce": 2.0, "nnz_mean": [4, 8], "dead": [1, 3], "d_ff": 10,
            "union": {"1": [0.1, 0.1], "256": [0.5, 0.25]}, "top_percent": {},
        }
    )  # fmt: skip
    assert found == {
        "held_out_ce": 2.0, "nnz_mean": 6.0, "dead": 0.2, "union": 0.375,
        "union_by_layer": [0.5, 0.25],
    }  # fmt: skip
    assert lasso.VARIANTS["l1 4.0e-3"] == ["l1_coefficient=4.0e-3", "lasso_share=0"]
    assert lasso.VARIANTS["lasso 5.0e-4"] == ["l1_coefficient=5.0e-4", "lasso_share=1"]
    assert len(lasso.VARIANTS) == 6


@pytest.mark.slow
def test_variants_are_trained_and_shown(
    tmp_path, monkeypatch, capsys, text_settings, in_this_process
):
    monkeypatch.setattr(lasso, "VARIANTS", {"lasso": lasso.VARIANTS["lasso 5.0e-3"]})
    small = [*SETTINGS, "model.context=300", "batch_tokens=1200", "micro_batch=2"]
    small += [f"run_dir={tmp_path}/runs", *text_settings]
    monkeypatch.setattr("sys.argv", ["lasso", str(lasso.BASE), *small, "--out", str(tmp_path)])
    lasso.main()
    (path,) = tmp_path.glob("lasso-*.json")
    content = json.loads(path.read_text())
    (row,) = content["rows"]
    assert content["seed"] == 0 and np.shape(row["union_by_layer"]) == (2,)
    assert 0 < row["union"] <= 1 and "lasso_share=1" in row["settings"]
    capsys.readouterr()
    monkeypatch.setattr("sys.argv", ["render", str(path)])
    render.main()
    assert f"| lasso | {row['held_out_ce']:.3f} |" in capsys.readouterr().out

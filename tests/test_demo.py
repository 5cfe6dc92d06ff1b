"""What `make demo` ends with."""

import json
import shutil
import subprocess

from tests.commands import ROOT, call, succeeded
from twell_jax import config


def test_both_runs_stand_side_by_side_in_four_lines(tmp_path):
    for name, nnz, ce in (("tiny", [8.0, 16.0], 1.7344), ("tiny-dense", [512.0, 512.0], 1.7)):
        run_dir = tmp_path / name
        run_dir.mkdir()
        changed = [f"run_dir={run_dir}", "model.layers=2"]
        (run_dir / "config.yaml").write_text(config.to_yaml(config.load("tiny", changed)))
        same = {"ce": 2.0, "l1": 0.0, "max_nnz": [512] * 2, "dead": [0.0] * 2}
        records = [
            same
            | {"step": step, "tokens_per_second": s, "mean_union": [0.5 if ce > 1.7 else 1.0, 1.0]}
            | {"nnz": [512.0] * 2 if step < 4 else nnz}
            for step, s in ((1, 0.0), (2, 12345.0), (3, 12346.0), (4, 99999.0), (5, 11111.0))
        ]
        records += [{"step": step, "held_out_ce": ce * 6 / step} for step in (3, 6)]
        lines = [json.dumps(record) + "\n" for record in records]
        (run_dir / "metrics.jsonl").write_text("".join(lines))
    runs = [f"sparse={tmp_path / 'tiny'}", f"dense={tmp_path / 'tiny-dense'}"]
    shown = succeeded(".ci/compare.py", *runs)
    assert shown.stdout.splitlines() == [
        "cross-entropy   sparse 1.734      dense 1.700      held-out, nats/token",
        "zeros           sparse 97.7%      dense 0.0%       of the hidden activations",
        "U               sparse 75.0%      dense 100.0%     of the neurons, for any of 256 tokens",
        "speed           sparse 12,345     dense 12,345     tokens/s, in training",
    ]

    (tmp_path / "tiny/metrics.jsonl").write_text("")
    refused = call(".ci/compare.py", *runs)
    assert refused.returncode == 1
    assert refused.stderr.startswith(f"error: {tmp_path / 'tiny'}: the run has no evaluation yet")


def test_the_demo_ends_with_the_comparison(tmp_path):
    python = tmp_path / ".venv/bin/python"
    python.parent.mkdir(parents=True)
    python.write_text('#!/bin/sh\necho "$@"\n')
    python.chmod(0o755)
    shutil.copytree(ROOT / ".ci", tmp_path / ".ci")
    ran = subprocess.run(
        ["bash", ".ci/demo"], cwd=tmp_path, check=True, capture_output=True, text=True
    )
    assert ran.stdout.splitlines()[-1] == ".ci/compare.py sparse=runs/tiny dense=runs/tiny-dense"

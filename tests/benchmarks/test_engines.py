"""benchmarks.engines: its rows are complete and rendered."""

import json
import os

import jax.numpy as jnp
import pytest

from benchmarks import engines, ffn, gradients, record
from benchmarks.pages import TABLES

NAME = "TWELL_JAX_BACK_END"


@pytest.mark.slow
def test_rows_are_complete_and_rendered(reference_kernels, monkeypatch, tmp_path):
    for module in ffn, gradients, engines:
        monkeypatch.setattr(module, "LAYERS", 1)  # each is compiled
    monkeypatch.setattr(engines, "PATTERNS", {"skewed": 10})
    monkeypatch.setattr(engines, "FEW", (3,))
    monkeypatch.setattr(engines, "product", lambda x, w: jnp.dot(x, w.T))
    rows = list(engines.measure("MMA", m=256, d=128, h=256))
    products, blocks, few = rows[:3], rows[3:-2], rows[-2:]
    assert [row["implementation"] for row in products] == ["mma.sync", "wgmma", "xla"]
    assert all(row["tflop_per_s"] > 0 for row in products)
    assert [(row["direction"], row["implementation"]) for row in blocks] == [
        (direction, name) for name in ("xla", "mosaic") for direction in engines.PRODUCTS
    ]
    for row in rows:
        assert max(row["errors"]) < 2e-2
    for row in blocks:
        assert row["baseline_ms"] == engines.PRODUCTS[row["direction"]] * products[0]["ms"]
        assert row["speedup"] == row["baseline_ms"] / row["ms"]
    assert [row["implementation"] for row in few] == ["xla", "mosaic"]
    assert all(row["m"] == 3 and row["baseline_ms"] == few[0]["ms"] for row in few)
    record.write("engines", rows, tmp_path / "engines.json")
    lines = TABLES["engines"].render(json.loads((tmp_path / "engines.json").read_text())["rows"])
    assert lines.count("mma.sync") == 4


@pytest.mark.parametrize("options", [[], ["--back-end", "Ampere"]])
def test_it_forces_the_back_end(options, monkeypatch, tmp_path):
    monkeypatch.delenv(NAME, raising=False)
    monkeypatch.setattr(engines, "measure", lambda name: iter([{name: os.environ.get(NAME)}]))
    monkeypatch.setattr("sys.argv", ["engines", *options, "--out", str(tmp_path)])
    with monkeypatch.context() as patch:
        patch.setattr(os, "environ", dict(os.environ))
        engines.main()
    *_, name = ["MMA", *options]
    (path,) = tmp_path.glob(f"engines-{name.lower()}-*.json")
    found = json.loads(path.read_text())
    assert found["benchmark"] == "engines" and found["rows"] == [{name: name}]

"""benchmarks.gradients: its rows are complete and rendered."""

import json

import numpy as np
import pytest

from benchmarks import ffn, gradients, record
from benchmarks.pages import TABLES
from twell_jax.ffn.residuals import Deciding


@pytest.mark.slow
@pytest.mark.parametrize("gated", [True, False])
def test_rows_are_complete_and_rendered(gated, reference_kernels, monkeypatch, tmp_path):
    for module in ffn, gradients:
        monkeypatch.setattr(module, "LAYERS", 1)  # each is compiled
    rows = list(
        gradients.measure(
            d=128, h=256, m=128, pattern="uniform", nnz=10, heavy_every=8, gated=gated,
            in_8_bits=True,
        )
    )  # fmt: skip
    for row in rows:
        assert len(row["errors"]) == (5 if gated else 4)  # y and the gradients
        assert max(row["errors"]) < (0.4 if "matmul_dtype" in row else 2e-2)
        assert row["speedup"] == row["baseline_ms"] / row["ms"]
        assert row["peak_bytes"] > 0 and row["kept_bytes"] > 0
    dense, sparse, half, by_use, planned, *in_8_bits = rows
    assert [row["matmul_dtype"] for row in in_8_bits] == 2 * ["float8"]
    assert in_8_bits[0]["implementation"] == "xla" and in_8_bits[1]["order"] == "by use"
    assert dense["implementation"] == "xla" and "overflow" not in dense
    assert (sparse["gradient_capacity"], half["gradient_capacity"]) == (1, 0.5)
    assert sparse["overflow"] == 0 and sparse["chosen"] == "dense"  # both chunks are used
    assert by_use["order"] == "by use" and by_use["kept_bytes"] == sparse["kept_bytes"]
    assert planned["chosen"] == "dense" and planned["kept_bytes"] == dense["kept_bytes"]
    assert sparse["union"] == 1 and half["kept_bytes"] < sparse["kept_bytes"]
    assert dense["kept_bytes"] >= 2 * 2 * 128 * 256  # g and u
    assert sparse["packing"] == "unions" and sparse["gradients"] == "sparse"
    record.write("gradients", rows, tmp_path / "gradients.json")
    stored = json.loads((tmp_path / "gradients.json").read_text())
    shared, _, *lines = TABLES["gradients"].render(stored["rows"]).splitlines()
    assert shared.startswith(f"All lines: pattern uniform, gated {'yes' if gated else 'no'}, ")
    assert [line.split(" | ")[0] for line in lines[2:]] == [
        "| xla", "| as drawn, capacity 1", "| as drawn, capacity 0.5", "| by use, capacity 1",
        "| by use, as planned", "| xla, float8", "| by use, capacity 1, float8",
    ]  # fmt: skip


def test_what_the_host_expects_to_gain_is_what_the_record_gains():
    path = max(record.RESULTS.glob("gradients-nvidia-h200-*.json"))
    rows = json.loads(path.read_text())["rows"]
    rows = [r for r in rows if r.get("gradient_capacity") == 1 and "matmul_dtype" not in r]
    assert {row["speedup"] > 1 for row in rows} == {True, False}
    for row in rows:
        m, h = row["m"], row["h"]
        slots, chunks = row["listed"] * m * h / 64, row["union"] * (m / 256) * (h / 128)
        deciding = Deciding(np.array([chunks, 0]), slots, row["heavy_rows"] % m)
        assert deciding.gains(m * h // 64, m, h, row["gated"]) == (row["speedup"] > 1)

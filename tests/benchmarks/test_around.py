"""benchmarks.around: rows of small cases, with the reference in the kernels' place."""

import pytest

from benchmarks import around
from benchmarks.pages import TABLES
from pallas_kernels.kernels import REFERENCE

SMALL = [
    around.Case("norm", 64, (128,)),
    around.Case("rounding", 512, (128, 64), 64),
    around.Case("rounding", 128, (64,)),
]


@pytest.mark.slow
def test_rows_are_complete_and_rendered(monkeypatch):
    monkeypatch.setattr(around, "IMPLEMENTATIONS", {"xla": REFERENCE, "kernel": REFERENCE})
    rows = [row for case in SMALL for row in around.measure(case)]
    assert [row["implementation"] for row in rows] == 3 * ["xla", "kernel"]
    errors = [row["error"] for row in rows]
    assert all(0 < error < 2.0**-8 for error in errors[:2])
    assert all(2.0**-6 < error < 2.0**-3 for error in errors[2:])  # of three bits
    for row in rows:
        moved = 4 * row["m"] * sum(row["widths"]) * (2 if row["operation"] == "norm" else 1)
        assert row["gb_per_s"] == pytest.approx(moved / row["ms"] / 1e6)
    *_, first, second, third = TABLES["around"].render(rows).splitlines()
    assert first.startswith("| norm | 64 | 128 | - | ")
    assert second.startswith("| rounding | 512 | 128, 64 | 64 | ")
    assert third.startswith("| rounding | 128 | 64 | - | ")

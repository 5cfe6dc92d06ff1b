"""benchmarks.live: dead neurons come last, and the numbers change no result."""

import jax
import numpy as np
import pytest

from benchmarks import live
from benchmarks.pages import TABLES


@pytest.mark.slow
def test_rows_are_complete_and_rendered(reference_kernels, monkeypatch):
    monkeypatch.setattr(live, "NNZ", 9)
    dead = (0.0, 0.5)
    x, weights, numbers = live.draw(40, 128, 256, dead)
    np.testing.assert_array_equal(numbers, [256, 128])
    gate = np.asarray(x, np.float32) @ np.asarray(weights[0][1], np.float32).T
    assert (gate[:, 128:] < -10).all()
    rows = list(live.measure(d=128, h=256, m=40, dead=dead))
    assert [row["implementation"] for row in rows] == ["xla", "mosaic", "live"]
    assert all(row["error"] < 1e-2 and row["ms"] > 0 for row in rows)
    assert rows[1]["error"] == rows[2]["error"]
    assert rows[2]["gain"] == rows[1]["ms"] / rows[2]["ms"]
    shared, _, *lines = TABLES["live"].render(rows).splitlines()
    assert shared == "All lines: M 40, dead by layer 0%, 50%."
    assert [line.split(" | ")[0] for line in lines[2:]] == ["| xla", "| mosaic", "| live"]
    assert f" | {rows[2]['gain']:.2f} | " in lines[4] and " | - | " in lines[3]
    assert jax.tree.leaves(weights)[0].shape == (2, 256, 128)

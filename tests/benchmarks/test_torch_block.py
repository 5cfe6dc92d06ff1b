"""benchmarks.torch_block: rows of both passes, with errors and speed-ups."""

import functools

import pytest

from tests.packages import needed

torch = needed("torch")

from benchmarks import torch_block  # noqa: E402
from benchmarks.pages import TABLES  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.slow]


def test_rows_of_both_passes(monkeypatch, reference_kernels):
    monkeypatch.setattr(torch_block, "draw", functools.partial(torch_block.draw, d=128, h=512))
    ran = []
    clock = iter([4.0, 3.0, 2.0] * 2)

    def milliseconds(run, calls):
        ran.append(run())
        return torch_block.LAYERS * next(clock)

    monkeypatch.setattr(torch_block.torch_decoder, "milliseconds", milliseconds)
    rows = [
        row
        for direction in (torch_block.FORWARD, torch_block.BOTH)
        for row in torch_block.measure(direction, "skewed", 1024)
    ]
    assert len(ran) == len(rows) == 6
    for row in rows:
        assert len(row["errors"]) == (1 if row["direction"] == torch_block.FORWARD else 5)
        assert 0 < max(row["errors"]) < 0.02
    assert [row["speedup"] for row in rows[:3]] == [0.75, 1, 1.5]
    assert "| 2.000 (1.50x)" in TABLES["torch_block"].render(rows)

"""benchmarks.torch_block: rows of both passes, with errors and speed-ups."""

import functools

import pytest

from tests.packages import needed

torch = needed("torch")

from benchmarks import published, torch_block  # noqa: E402
from benchmarks.pages import TABLES  # noqa: E402

pytestmark = [pytest.mark.peers, pytest.mark.slow]


# What a checkout of the published kernels has, with one wrong row.
CHECKOUT = {
    "twell_modules/twell.py": """
import torch


class TwELLGatedMLP(torch.nn.Module):
    def __init__(self, layer_number, GATE, UP, DOWN):
        super().__init__()
        assert DOWN.is_contiguous()
        self.weights = GATE, UP, DOWN

    def forward(self, A):
        gate, up, down = self.weights
        y = (torch.relu(A @ gate.T) * (A @ up.T)) @ down
        y[3] = 0
        return y
""",
    "hybrid_modules/sparse_ops_loader.py": """
import torch


def load_sparse_ops():
    library = torch.library.Library("sparse_ops", "FRAGMENT")
    library.define("ff_forward_gated(Tensor x, Tensor g, Tensor k, Tensor v) -> Tensor[]")
    library.impl("ff_forward_gated", block, "CompositeImplicitAutograd")
    load_sparse_ops.library = library


def block(x, gate, up, down):
    batch, tokens, width = x.shape
    return [(torch.relu(x @ gate.T) * (x @ up.T)) @ down, x.sum()]
""",
}


@pytest.fixture
def checkout(tmp_path):
    for name, text in CHECKOUT.items():
        path = tmp_path / "custom_models" / name
        path.parent.mkdir(parents=True)
        path.write_text(text)
    return tmp_path


def test_rows_of_both_passes(monkeypatch, reference_kernels, checkout):
    monkeypatch.setattr(torch_block, "draw", functools.partial(torch_block.draw, d=128, h=512))
    ran = []
    clock = iter([4.0, 3.0, 2.0, 1.5, 1.2, 1.0] * 2)

    def milliseconds(run, calls):
        ran.append(run())
        return torch_block.LAYERS * next(clock)

    monkeypatch.setattr(torch_block.torch_decoder, "milliseconds", milliseconds)
    rows = [
        row
        for direction in (torch_block.FORWARD, torch_block.BOTH)
        for row in torch_block.measure(direction, "skewed", 1024, 512, checkout=checkout)
    ]
    assert len(ran) == len(rows) == 12
    for row in rows:
        forward = row["direction"] == torch_block.FORWARD
        is_wrong = forward and row["implementation"] == "published"
        assert len(row["errors"]) == (1 if forward else 5) and row["heavy_rows"] == 2
        assert row["wrong_rows"] == is_wrong
        assert 0 < max(row["errors"]) < (0.2 if is_wrong else 0.02)
    assert [row["speedup"] for row in rows[:6]] == [0.75, 1, 1.5, 2, 2.5, 3]
    assert "| 2.000 (1.50x)" in TABLES["torch_block"].render(rows)


def test_what_is_no_checkout_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="--published takes a checkout"):
        published.forward(tmp_path)

"""The blocks of others, which the feed-forward benchmark measures beside ours."""

import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks import ffn, record, sparse_peers, xla_fp8
from tests import seeds
from tests.conformance.cases import draw
from tests.errors import ROUNDING, relative_error
from tests.packages import needed

M, D, H = 24, 48, 80


def drawn():
    """x and weights with rows of very different sizes, one of them zero."""
    rng = seeds.rng()
    x, *weights = (rng.standard_normal((n, D)) / D**0.5 for n in (M, H, H, H))
    x[::3] *= 50
    x[5] = 0
    weights[0][::2] *= 1e-3
    weights[1][7] = 0
    return [jnp.asarray(a, jnp.bfloat16) for a in (x, *weights)]


def check_rounding(values, scale, a):
    """e4m3 has 3 bits after the leading one, and steps of 2**-9 below 2**-6."""
    values, scale, a = (np.asarray(m).astype(np.float64) for m in (values, scale, a))
    assert np.all(np.abs(values * scale - a) <= np.maximum(np.abs(a) / 16, scale * 2.0**-10) * 1.01)


@pytest.mark.slow
@pytest.mark.parametrize(("rows", "fast"), [(True, False), (False, True)])
def test_xla_multiplies_quantised_operands(rows, fast):
    x, *layer = drawn()
    scaled = [xla_fp8.quantised(a, rows=rows) for a in (x, layer[0])]
    for (values, scale), a in zip(scaled, (x, layer[0]), strict=True):
        assert values.dtype == jnp.float8_e4m3fn
        assert scale.shape == ((len(a), 1) if rows else ())
        check_rounding(values, scale, a)
    a, b = (np.asarray(m.values, np.float64) * np.asarray(m.scale, np.float64) for m in scaled)
    assert relative_error(xla_fp8.product(*scaled, rows, fast), a @ b.T) < ROUNDING

    (y,) = xla_fp8.stack(x, [xla_fp8.prepare(layer, rows=rows)], rows=rows, fast=fast)
    x, w_gate, w_up, w_down = (np.asarray(m, np.float64) for m in (x, *layer))
    exact = (np.maximum(x @ w_gate.T, 0) * (x @ w_up.T)) @ w_down
    assert y.dtype == jnp.bfloat16
    assert ROUNDING < relative_error(y, exact) < 0.1


@pytest.mark.slow
def test_a_peer_that_is_not_there_is_a_row_that_says_so(monkeypatch, reference_kernels):
    monkeypatch.setattr(ffn, "LAYERS", 1)
    ours = ("unions, fp8 gate", "unions, fp8 gate and up")
    names = (*ours, "xla, fp8 rows", "torch, fp8 rows", *sparse_peers.FORMATS)
    peers = {name: ffn.PEERS[name] for name in names}
    monkeypatch.setattr(ffn, "PEERS", peers)
    rows = {
        row["implementation"]: row
        for row in ffn.measure(d=128, h=256, m=128, pattern="skewed", nnz=5, peers=True)
    }
    assert list(rows) == ["xla", "mosaic", *ffn.PEERS]
    assert rows["mosaic"]["packing"] == "unions" and rows["mosaic"]["error"] < 1e-2
    assert all(rows[name]["error"] < 1e-2 for name in sparse_peers.FORMATS)
    assert all(ROUNDING < rows[name]["error"] < 0.2 for name in ours)
    assert all(rows[name]["twin_error"] < 2 * ROUNDING for name in ours)
    for name in set(ffn.PEERS) - {*ours, *sparse_peers.FORMATS}:
        assert "ms" not in rows[name] and "\n" not in rows[name]["failed"]
    assert xla_fp8.CALL in rows["xla, fp8 rows"]["failed"]


@pytest.mark.peers
def test_torch_multiplies_quantised_operands():
    torch = needed("torch")
    from benchmarks import torch_ffn

    x, *layer = (torch.from_dlpack(a) for a in drawn())
    exact = [a.double() for a in (x, *layer)]
    h = torch.relu(exact[0] @ exact[1].T) * (exact[0] @ exact[2].T)
    assert relative_error(torch_ffn.dense_block(x, *layer).float(), h @ exact[3]) < 0.01
    for rows in (True, False):
        q = torch_ffn.quantised(x, rows=rows)
        check_rounding(q.values.float(), q.scale, x.float())


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("name", sparse_peers.FORMATS)
def test_sparse_formats_compute_the_block(name, gated):
    x, *weights = draw(37, 64, 128, gated=gated, dtype=np.float32, threshold=1)
    x[3, -1], x[4, -1] = -1000, 1000  # all neurons are active, and none
    w_gate, w_up, w_down = weights
    g = np.maximum(x @ (w_gate if gated else w_up).T, 0)
    expected = (g * (x @ w_up.T) if gated else g) @ w_down
    for y in sparse_peers.runner(name, x, weights)(x, 2 * [weights]):
        assert record.relative_error(y, expected) < 1e-5


def test_formats_without_capacity_say_so(monkeypatch):
    x, layers = jnp.ones((8, 16)), [3 * (jnp.ones((32, 16)),)]
    for name in sparse_peers.FORMATS:
        short = sparse_peers.Capacity(width=31, entries=8 * 32 - 1)
        (y,) = sparse_peers.stack(x, layers, name=name, capacity=short)
        assert np.isnan(y).all()
    monkeypatch.setattr(sparse_peers, "MAX_WIDTH", 31)
    monkeypatch.setattr(sparse_peers, "MAX_BYTES", 1000)
    with pytest.raises(ValueError, match="ellpack would be 32 wide, more than 31"):
        sparse_peers.runner("ellpack", x, layers[0])
    with pytest.raises(ValueError, match=r"bcoo would gather .* more than 1000"):
        sparse_peers.runner("bcoo", x, layers[0])

"""benchmarks.torch_scoring: a record of a small model, and its scores against ours."""

import functools
import json

import jax.numpy as jnp
import numpy as np
import pytest
from flax import nnx

from tests.errors import relative_error
from tests.packages import needed

torch = needed("torch")
needed("transformers")

from benchmarks import inference, scores, torch_scoring  # noqa: E402
from benchmarks.pages import TABLES  # noqa: E402
from twell_jax import config as config_lib  # noqa: E402

pytestmark = pytest.mark.peers

ROWS = ["torch", "torch, compiled", "kernels", "kernels, compiled"]


@pytest.fixture
def small(monkeypatch, tmp_path):
    """The path of a small configuration; a clock by which the rows take 4, 3, 2 and 1 ms."""
    path = tmp_path / "2b.yaml"
    path.write_text(
        "{run_dir: x, steps: 1, batch_tokens: 32, micro_batch: 1, model: {vocab_size: 300, "
        "context: 32, d_model: 128, layers: 2, heads: 4, d_ff: 256, init_scale: 0.1}}"
    )
    clock = iter([4.0, 3.0, 2.0, 1.0])
    monkeypatch.setattr(
        torch_scoring.torch_decoder, "milliseconds", lambda run, calls: (run(), next(clock))[1]
    )
    # Inductor would take half a minute for what Dynamo traces in seconds.
    monkeypatch.setattr(torch, "compile", functools.partial(torch.compile, backend="eager"))
    return path


def test_a_record_has_the_scores_of_our_model(small, monkeypatch, tmp_path):
    command = ["torch_scoring", str(small), "model.d_ff=384", "--sequences", "3"]
    monkeypatch.setattr("sys.argv", [*command, "--out", str(tmp_path)])
    torch_scoring.main()
    (path,) = tmp_path.glob("torch_scoring-*.json")
    rows = json.loads(path.read_text())["rows"]
    assert [row["implementation"] for row in rows] == ROWS
    config = config_lib.load(str(small), ["model.d_ff=384"]).model
    graph, params = nnx.split(torch_scoring.draw(config, inference.NNZ["2b"]))
    tokens = inference.draw_tokens(config.vocab_size, 3, config.context)
    expected = float(scores.score(graph, params, jnp.asarray(tokens))["error"].mean())
    for row in rows:
        assert row["cross_entropy"] == pytest.approx(expected, rel=0.002)
        assert 0 < row["error"] < 0.01 and 0 < row["logits_error"] < 0.02
        assert (row["model"], row["batch"], row["context"]) == ("2b", 3, 32)
        assert row["baseline"] == "torch, compiled" and row["baseline_ms"] == 3
        assert row["speedup"] == 3 / row["ms"]
        assert row["tokens_per_second"] == 3 * 32 / row["ms"] * 1e3
        assert row.get("computed_by") == ("torch" if row["implementation"] in ROWS[2:] else None)
    assert "| kernels | 2.000 (1.50x) | 48,000 | " in TABLES["torch_scoring"].render(rows)


def test_scores_are_those_of_our_model_token_by_token(small):
    config = config_lib.load(str(small)).model
    model = torch_scoring.draw(config, 24)
    llama = torch_scoring.in_torch(model)
    tokens = inference.draw_tokens(config.vocab_size, 3, config.context)
    ids = torch.from_numpy(tokens).long()
    exact, nnz = torch_scoring.reference(llama, ids, 2)
    parts = llama.model, functools.partial(torch_scoring.scores_of, llama.lm_head)
    found = torch_scoring.score(*parts, ids, 2)
    graph, params = nnx.split(model)
    expected = scores.score(graph, params, jnp.asarray(tokens))
    for key in expected:
        for ours in (found, exact):
            assert relative_error(ours[key].numpy(), np.asarray(expected[key])) < 0.01
    for layer in llama.model.layers:
        layer.mlp.register_forward_hook(lambda mlp, args, y: torch.zeros_like(y))
    without = torch_scoring.score(*parts, ids, 2)
    assert relative_error(without["error"].numpy(), exact["error"].numpy()) > 0.02
    counted = inference.pattern(config, params, tokens)
    assert nnz == pytest.approx(counted["nnz_mean"], rel=0.05)


def test_what_fails_is_a_row_and_no_baseline(small, monkeypatch):
    def fail(*args, **kwargs):
        raise RuntimeError("no compiler")

    monkeypatch.setattr(torch, "compile", fail)
    config = config_lib.load(str(small)).model
    llama = torch_scoring.in_torch(torch_scoring.draw(config, 24))
    rows = list(torch_scoring.measure(llama, inference.draw_tokens(config.vocab_size, 1, 32)))
    assert [row["implementation"] for row in rows] == ROWS
    assert [row.get("failed") for row in rows] == [None, "RuntimeError: no compiler"] * 2
    assert [row.get("speedup") for row in rows] == [1, None, 4 / 3, None]
    assert {row["baseline"] for row in rows} == {"torch"}

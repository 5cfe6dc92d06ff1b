"""A run that plans the gradients of each layer, on the kernels' reference functions."""

import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import pattern_shares
from pallas_kernels.kernels import HOPPER
from tests.commands import as_in_a_new_process
from tests.runs.started import records, stopped_at
from twell_jax import config
from twell_jax.ffn import dispatch
from twell_jax.train import loop, trainer
from twell_jax.train.checkpoint import Checkpoints
from twell_jax.train.compile_ahead import CompileAhead
from twell_jax.train.run_directory import load_run

STEPS = 8


@pytest.fixture
def settings(workspace, monkeypatch, reference_kernels):
    """`settings(directory)` is a configuration whose layers overflow as soon as they are sparse.

    Where they are dense, they measure a smaller capacity than they need. Every program is ready
    when it is asked for, as here a step takes less time than compiling one.
    """
    monkeypatch.setattr(CompileAhead, "is_ready", lambda *_: True)
    monkeypatch.setattr(pattern_shares, "of_dense", lambda *_, **__: 2 * (jnp.float32(0.1),))

    def load(directory, *changes):
        return config.load(
            workspace / "config.yaml",
            [
                f"run_dir={directory}", f"steps={STEPS}", "sparse_gradients_every=2", "log_every=1",
                "batch_tokens=512", "micro_batch=16", "model.d_model=128", "model.d_ff=128",
                "model.dtype=bfloat16", *changes,
            ],
        )  # fmt: skip

    with as_in_a_new_process():
        yield load


def train(settings):
    loop.train(settings, require_in_place=lambda: None)


@pytest.mark.slow
def test_an_interrupted_run_plans_as_one_that_is_not(settings, tmp_path, capsys):
    train(settings(tmp_path / "whole"))
    whole = [line for line in records(tmp_path / "whole") if "ce" in line]
    # Planned after every second step: all sparse, found not to fit, dense, and sparse once more.
    planned = [line["sparse_gradients"][0] for line in whole]
    assert planned == [False, False, True, True, False, False, True, True]
    assert [line["overflow"][0] for line in whole] == planned
    assert [line["union"][0] for line in whole] == [1 if s else pytest.approx(0.1) for s in planned]
    told = "up to step 3 layers 0, 1 exceeded the capacity of their sparse gradients"
    assert told in " ".join(capsys.readouterr().out.split())

    with stopped_at(3):  # layers are sparse
        train(settings(tmp_path / "parts"))
    with Checkpoints(tmp_path / "parts/checkpoints", keep=1) as checkpoints:
        saved = checkpoints.restore_position()
    assert {"choice", "choose_from"} < saved.keys()  # the names that older checkpoints have
    with stopped_at(5):  # dense again, with a wider margin
        train(settings(tmp_path / "parts"))
    train(settings(tmp_path / "parts"))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


@pytest.mark.slow
def test_all_layers_may_have_sparse_gradients_and_inference_asks_for_none(settings, tmp_path):
    every_layer = ["steps=1", "sparse_gradients_every=0", "model.ffn_gradients=sparse"]
    train(settings(tmp_path / "run", *every_layer))
    first, *_ = records(tmp_path / "run")
    assert first["overflow"] == [0, 0]  # by default the capacity is enough for all
    assert first.keys().isdisjoint({"sparse_gradients", "union", "listed"})
    run, _, model = load_run(tmp_path / "run")
    assert (run.model.ffn_gradients, model.config.ffn_gradients) == ("sparse", None)


@pytest.mark.slow
def test_a_run_goes_on_where_there_are_no_kernels(settings, tmp_path, monkeypatch, caplog):
    run_dir = tmp_path / "run"
    with stopped_at(3):  # layers are sparse
        train(settings(run_dir))
    monkeypatch.setattr(dispatch, "BACK_ENDS", (HOPPER,))
    train(settings(run_dir))
    assert [message for message in caplog.messages if "all gradients are dense" in message] == [
        "sparse_gradients_every: it needs a Hopper GPU, got cpu; here all gradients are dense"
    ]
    assert [line["step"] for line in records(run_dir) if "ce" in line] == [*range(1, STEPS + 1)]
    train(settings(run_dir))  # shows the result


@pytest.mark.slow
def test_neurons_are_ordered_by_use_and_the_model_stays_the_same(settings, tmp_path, monkeypatch):
    wide = ["model.d_ff=256", "steps=5", "eval_every=5"]
    train(settings(tmp_path / "ordered", *wide))
    drawn = lambda tiles, nnz: jnp.arange(tiles.size, dtype=jnp.int32)  # noqa: E731
    monkeypatch.setattr(trainer, "order_by_use", drawn)
    train(settings(tmp_path / "drawn", *wide))
    for ours, theirs in zip(
        records(tmp_path / "ordered"), records(tmp_path / "drawn"), strict=True
    ):
        for name in {"ce", "held_out_ce"} & ours.keys():
            assert ours[name] == pytest.approx(theirs[name], rel=2e-3)

    models = [load_run(tmp_path / name)[2] for name in ("ordered", "drawn")]
    gates = [np.asarray(model.blocks.mlp.w_gate[...]) for model in models]
    for ordered, as_drawn in zip(*gates, strict=True):
        distances = np.linalg.norm(ordered[:, None] - as_drawn, axis=-1)
        before = distances.argmin(axis=1)
        assert sorted(before) == [*range(256)] and (before != np.arange(256)).any()

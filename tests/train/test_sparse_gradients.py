"""A run that chooses for each layer between dense and sparse gradients, by the kernels' twins."""

import signal

import jax
import pytest

import train
from tests.train.runs import records
from tests.twell_jax.ffn.cases import use_twins
from twell_jax import config
from twell_jax.ffn import mosaic as ffn_mosaic
from twell_jax.ffn.api import CannotServe
from twell_jax.train import distributed
from twell_jax.train import gradient_plan as choice

STEPS = 6


@pytest.fixture
def settings(workspace, monkeypatch):
    """`settings(directory)` is a configuration whose layers overflow as soon as they are sparse."""
    use_twins(monkeypatch.setattr)
    monkeypatch.setattr(choice, "_FIRST_SHARE", 1.0)
    monkeypatch.setattr(train.sharding, "make_mesh", one_device(train.sharding.make_mesh))

    def load(directory, *changes):
        return config.load(
            workspace / "config.yaml",
            [
                f"run_dir={directory}", f"steps={STEPS}", "sparse_gradients_every=2", "log_every=1",
                "batch_tokens=512", "micro_batch=16", "model.d_model=128", "model.d_ff=128",
                "model.dtype=bfloat16", *changes,
            ],
        )  # fmt: skip

    on_sigterm = signal.getsignal(signal.SIGTERM)
    with jax.set_mesh(jax.make_mesh((1,), ("x",))):  # at its end, no mesh again: a run sets one
        yield load
    signal.signal(signal.SIGTERM, on_sigterm)


def one_device(make_mesh):
    return lambda settings, _=None: make_mesh(settings, jax.devices("cpu")[:1])


def test_an_interrupted_run_chooses_as_one_that_is_not(settings, tmp_path, monkeypatch):
    train.train(settings(tmp_path / "whole"))
    whole = [line for line in records(tmp_path / "whole") if "ce" in line]
    # Chosen after every second step, from the one before it: tried, then found not to fit.
    chosen = [line["sparse_gradients"][0] for line in whole]
    assert chosen == [False, False, True, True, False, False]
    assert [line["overflow"][0] for line in whole] == chosen

    with monkeypatch.context() as patch:  # stops after the step to choose from
        patch.setattr(distributed, "stop_request", lambda: lambda step: step == 3)
        train.train(settings(tmp_path / "parts"))
    train.train(settings(tmp_path / "parts"))
    assert records(tmp_path / "parts") == records(tmp_path / "whole")


def test_a_run_goes_on_where_there_are_no_kernels(settings, tmp_path, monkeypatch):
    train.train(settings(tmp_path / "run"))
    monkeypatch.setattr(ffn_mosaic, "_no_hopper", lambda: "it needs a Hopper GPU, got cpu")
    train.train(settings(tmp_path / "run"))  # shows the result
    with pytest.raises(CannotServe):
        train.train(settings(tmp_path / "run", "steps=8"))
    train.train(settings(tmp_path / "run", "steps=8", "sparse_gradients_every=0"))
    assert [line["step"] for line in records(tmp_path / "run") if "ce" in line] == [*range(1, 9)]

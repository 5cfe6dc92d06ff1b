"""What the model that a run ended with is estimated to gain."""

from types import SimpleNamespace

import jax
import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.twell_jax import drawn
from tests.twell_jax.configs import VALID
from twell_jax import config as config_lib
from twell_jax.analysis import activity
from twell_jax.analysis import estimate as estimates
from twell_jax.analysis.activity import measure_activity
from twell_jax.models import sharding
from twell_jax.train import gain
from twell_jax.train.state import abstract_state

MODEL = {
    "vocab_size": 61, "context": 256, "d_model": 64, "layers": 1, "heads": 2, "d_ff": 128,
    "dtype": "float32",
}  # fmt: skip
EVERY_WIDTH = dict.fromkeys(estimates.SHAPES, ((64, 64), (128, 128)))


def estimated(devices, sequences=6, **changes):
    """Of drawn weights and tokens on so many devices, and the tokens."""
    config = config_lib.from_dict(VALID | {"model": MODEL | changes, "batch_tokens": 8 * 256})
    mesh = sharding.make_mesh((1, devices), jax.devices()[:devices])
    model = drawn.transformer(**MODEL | changes)
    shapes = abstract_state(config, mesh).params
    params = jax.tree.map(lambda a, to: jax.device_put(a, to.sharding), nnx.state(model), shapes)
    tokens = seeds.rng().integers(0, 61, (sequences, 257), np.int32)
    data = SimpleNamespace(held_out=tokens, tokenizer=SimpleNamespace(eot_id=0))
    with jax.set_mesh(mesh):
        return gain.estimated(config, data, params, mesh), model, tokens


@pytest.mark.slow
def test_it_is_that_of_the_held_out_text_on_any_number_of_devices(monkeypatch):
    monkeypatch.setattr(estimates, "SHAPES", EVERY_WIDTH)
    monkeypatch.setattr(activity, "UNION_SIZES", (256,))  # the others take time to compile
    found, model, tokens = estimated(2)
    expected = estimates.estimate(model.config, measure_activity(model, tokens, batch=2))
    assert found.layers["forward"] == pytest.approx(expected.layers["forward"], rel=1e-3)
    assert found.model == pytest.approx(expected.model, rel=1e-3)


def test_where_nothing_can_be_estimated_no_neuron_is_looked_at(monkeypatch):
    monkeypatch.setattr(gain, "measure_activity", lambda *_, **__: pytest.fail("looked"))
    for changes, why in (
        ({}, "d_model is 64, in the records"),
        ({"activation": "silu"}, "silu is zero for no neuron"),
    ):
        found, *_ = estimated(1, **changes)
        assert found.model == {} and found.layers["both"] == [None] and why in str(found)


def test_a_process_that_sees_a_part_estimates_nothing(monkeypatch):
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    assert gain.estimated(None, None, None, None) is None

"""Architectures that transformers has no class of, against float64; and what their files must say.

Those that it has are compared with what it computes: in test_pretrained with recorded logits, in
test_transformers wherever it is installed.
"""

import json

import numpy as np
import pytest
from flax import nnx

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax.models.pretrained import written
from twell_jax.models.pretrained import PretrainedError, from_pretrained

MINICPM = {
    "model_type": "minicpm", "hidden_act": "relu", "scale_emb": 3, "scale_depth": 1.4,
    "dim_model_base": 8,
}  # fmt: skip
forward = nnx.jit(lambda model, tokens: model(tokens))


def relu(z):
    return np.maximum(z, 0)


MODELS = {
    "minicpm": (MINICPM, lambda gate, up: relu(gate) * up),
}


@pytest.mark.parametrize("name", MODELS)
def test_logits_match_float64(tmp_path, name):
    config, mlp = MODELS[name]
    written.write(tmp_path, **config)
    tokens = seeds.rng().integers(0, written.SHAPE["vocab_size"], (2, 12))
    logits, _ = forward(from_pretrained(tmp_path), tokens)
    assert relative_error(logits, [written.logits(tmp_path, row, mlp) for row in tokens]) < 1e-5


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (MINICPM | {"scale_emb": None}, "scale_emb must be a positive number, got None"),
        (MINICPM | {"dim_model_base": 0}, "dim_model_base must be a positive number, got 0"),
        (MINICPM | {"num_experts": 8}, "num_experts=8 is not supported; it must be None or 0"),
        (MINICPM | {"sparse_config": {}}, "sparse_config={} is not supported"),
        ({"model_type": "minicpm"}, "has no scale_emb"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window .*greater than 0"),
    ],
)
def test_what_a_config_must_not_say(tmp_path, config, says):
    (tmp_path / "config.json").write_text(json.dumps(written.SHAPE | config))
    with pytest.raises(PretrainedError, match=says) as error:
        from_pretrained(tmp_path)
    assert "\n" not in str(error.value)

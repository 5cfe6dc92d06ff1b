"""Architectures that transformers has no class of, against float64; and what their files must say.

Those that it has are compared with what it computes: in test_forms with recorded logits, in
test_transformers where it is installed, by `make test-all`.
"""

import json

import jax
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax.models.pretrained import written
from tests.twell_jax.models.pretrained.written import BAMBOO, FATRELU, MINICPM, MODELS
from twell_jax.models.pretrained import PretrainedError, from_pretrained
from twell_jax.models.pretrained import config as pretrained_config

forward = nnx.jit(lambda model, tokens: model(tokens))


@pytest.mark.sampled(2)
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
        ({"model_type": "bamboo"}, "hidden_act='silu' is not supported; it must be 'relu'"),
        (FATRELU | {"hidden_act_param": 0}, "hidden_act_param must be a positive number, got 0"),
        ({"model_type": "nemotron", "partial_rotary_factor": 0.3}, "an even number of the 4 feat"),
        ({"model_type": "mistral", "sliding_window": 0}, "sliding_window .*greater than 0"),
    ],
)
def test_what_a_config_must_not_say(tmp_path, config, says):
    (tmp_path / "config.json").write_text(json.dumps(written.SHAPE | config))
    with pytest.raises(PretrainedError, match=says) as error:
        from_pretrained(tmp_path)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("llama", {"head_size": None, "tie_embeddings": False, "norm_eps": 1e-6, "context": 2048}),
        ("qwen2", {"kv_heads": 32, "attention_bias": True, "context": 32768}),
        ("qwen3", {"kv_heads": 32, "head_size": 128, "qk_norm": True, "context": 32768}),
        ("mistral", {"kv_heads": 8, "sliding_window": 4096, "context": 131072}),
        ("arcee", {"activation": "relu2", "gated": False, "norm_eps": 1e-5, "context": 4096}),
        ("nemotron", {"activation": "relu2", "rotary_fraction": 0.5, "norm_eps": 1e-5}),
        ("minicpm", {"tie_embeddings": True, "activation": "relu", "context": 2048}),
    ],
)
def test_what_a_config_leaves_out_is_as_the_classes_of_its_model_have_it(tmp_path, name, expected):
    needed = "vocab_size", "intermediate_size", "num_hidden_layers"
    config = {key: written.SHAPE[key] for key in needed} | {"model_type": name}
    config |= {"hidden_size": 128, "num_attention_heads": 32}
    config |= MINICPM if name == "minicpm" else {}
    (tmp_path / "config.json").write_text(json.dumps(config))
    found, _ = pretrained_config.read(tmp_path, None, None)
    assert {key: getattr(found, key) for key in expected} == expected


@pytest.mark.parametrize(
    ("changes", "warns"),
    [
        ({"hidden_act": "relu"}, "hidden_act='fatrelu' and hidden_act_param=0.3"),
        ({"hidden_act": "relu", "hidden_act_param": None}, "hidden_act_param=its threshold"),
        ({"hidden_act": "relu", "model_type": "llama"}, "hidden_act_param=0.3"),
        ({}, None),
        ({"hidden_act": "relu", "model_type": "llama", "hidden_act_param": None}, None),
        ({"hidden_act": "silu", "model_type": "llama"}, None),
    ],
)
def test_a_relu_that_leaves_out_a_threshold_is_a_warning(tmp_path, caplog, changes, warns):
    written.write(tmp_path, **FATRELU | changes)
    config = from_pretrained(tmp_path).config
    assert config.activation == changes.get("hidden_act", "fatrelu")
    assert config.activation_threshold == (0 if changes else 0.3)
    if warns is None:
        assert not caplog.messages
    else:
        (message,) = caplog.messages
        assert "the weights were trained for a FATReLU" in message and warns in message
        assert "\n" not in message


def test_predictors_of_bamboo_files_are_passed_over(tmp_path):
    written.write(tmp_path, **BAMBOO)
    expected = nnx.state(from_pretrained(tmp_path))
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.mlp.predictor.fc1.weight"] = np.zeros((3, 16), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    found = nnx.state(from_pretrained(tmp_path))
    jax.tree.map(np.testing.assert_array_equal, found, expected)

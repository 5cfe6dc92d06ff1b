"""Models are written in the form of their architecture: as they were read, and as others read it.

What transformers computes of them is in test_transformers.
"""

import json
import logging
from pathlib import Path

import numpy as np
import pytest
import tokenizers as hf
from flax import nnx
from safetensors.numpy import load_file

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax.models.pretrained import written
from tests.twell_jax.models.pretrained.small import assert_same_parameters, make
from tests.twell_jax.models.pretrained.test_architectures import MODELS
from twell_jax.data.tokenizers import ByteTokenizer, SubwordTokenizer
from twell_jax.models.pretrained import PretrainedError, from_pretrained, save_pretrained
from twell_jax.models.pretrained.architectures import ARCHITECTURES

FIXTURES = Path(__file__).parent / "fixtures"
YARN = {"type": "yarn", "factor": 2, "original_context": 9, "beta_fast": 8}
forward = nnx.jit(lambda model, tokens: model(tokens)[0])


def tokenizer(splitting=None):
    """Two tokens; with `splitting` a byte-level BPE that splits by this regular expression."""
    backend = hf.Tokenizer(hf.models.BPE(vocab={"</s>": 0, "a": 1}, merges=[]))
    if splitting:
        in_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = hf.pre_tokenizers.Split(hf.Regex(splitting), "isolated")
        backend.normalizer = hf.normalizers.NFC()
        backend.pre_tokenizer = hf.pre_tokenizers.Sequence([split, in_bytes])
    return SubwordTokenizer(backend, "</s>")


def settings(directory):
    return json.loads((directory / "config.json").read_text())


@pytest.mark.parametrize("name", sorted(path.name for path in FIXTURES.iterdir()))
def test_a_model_of_transformers_is_written_as_it_was(tmp_path, name):
    source, kind = FIXTURES / name, settings(FIXTURES / name)["model_type"]
    model = from_pretrained(source)
    save_pretrained(tmp_path, model, tokenizer(ARCHITECTURES[kind].splitting))
    before, after = settings(source), settings(tmp_path)
    assert after["model_type"] == kind and after["architectures"] == before["architectures"]
    old, new = (load_file(path / "model.safetensors") for path in (source, tmp_path))
    assert old.keys() == new.keys()
    for key in old:  # 1 is added to some scales and taken away again
        np.testing.assert_allclose(new[key], old[key], rtol=0, atol=2e-7)
    recorded = np.load(source / "logits.npz")
    logits = forward(from_pretrained(tmp_path), recorded["tokens"])
    assert relative_error(logits, recorded["logits"]) < 1e-5


@pytest.mark.parametrize("name", MODELS)
def test_a_model_that_transformers_does_not_have_is_written_as_it_was(tmp_path, caplog, name):
    config, mlp = MODELS[name]
    source, directory = tmp_path / "source", tmp_path / "written"
    source.mkdir()
    written.write(source, **config)
    with caplog.at_level(logging.WARNING):
        save_pretrained(directory, from_pretrained(source), tokenizer())
    (message,) = caplog.messages
    assert f"is written as model_type={config['model_type']}, whose class is no part" in message
    kept = settings(directory)
    assert {key: kept[key] for key in config} == config
    old, new = (load_file(path / "model.safetensors") for path in (source, directory))
    assert old.keys() == new.keys()
    for key in old:
        np.testing.assert_array_equal(new[key], old[key])
    # The other reader takes the keys of config.json and the tensors by their published names.
    tokens = seeds.rng().integers(0, written.SHAPE["vocab_size"], 12)
    logits = forward(from_pretrained(directory), tokens[None])
    assert relative_error(logits[0], written.logits(directory, tokens, mlp)) < 1e-5


UNGATED = {"gated": False, "activation": "relu2"}
OURS = {
    "mistral": {"sliding_window": 5, "kv_heads": 2, "rope_scaling": YARN},
    "qwen3": {"qk_norm": True, "head_size": 6, "attention_bias": True, "activation": "silu"},
    "arcee": {**UNGATED, "mlp_bias": True, "attention_bias": True, "tie_embeddings": False},
    "nemotron": {**UNGATED, "norm": "layer", "rotary_fraction": 0.5, "mlp_bias": True},
    "sparsellama": {"activation": "fatrelu", "activation_threshold": 0.01, "mlp_bias": True},
    "minicpm": {
        "embed_scale": 12.0, "residual_scale": 1.4 / 2**0.5, "activation": "fatrelu",
        "activation_threshold": 0.25, "attention_bias": True,
    },
    "bamboo": {"activation": "drelu", "sliding_window": 7},
    "llama": {"attention_bias": True},  # whose tokenizer is not that of a Qwen2
}  # fmt: skip


@pytest.mark.parametrize("name", OURS)
def test_what_is_written_is_read_as_the_same_model(tmp_path, name):
    model = make(**OURS[name])
    if OURS[name].get("norm") == "layer":  # scales to which 1 can be added without rounding
        model.norm.scale[...] += 2.0**-7
    save_pretrained(tmp_path, model, ByteTokenizer(), max_shard_bytes=3000)
    assert settings(tmp_path)["model_type"] == name
    loaded = from_pretrained(tmp_path)
    stored = {"dtype": model.config.param_dtype, "kv_heads": model.config.num_kv_heads,
              "head_size": model.config.head_dim}  # fmt: skip
    assert loaded.config == model.config.model_copy(update=stored)
    assert_same_parameters(loaded, model)


def test_a_qwen2_is_a_llama_if_its_output_has_a_bias_or_its_tokenizer_is_another(tmp_path):
    model = make(attention_bias=True)
    own = tokenizer(ARCHITECTURES["qwen2"].splitting)
    save_pretrained(tmp_path / "own", model, own)
    assert settings(tmp_path / "own")["model_type"] == "qwen2"
    assert "model.layers.0.self_attn.o_proj.bias" not in load_file(
        tmp_path / "own/model.safetensors"
    )
    assert_same_parameters(from_pretrained(tmp_path / "own"), model)
    # transformers would split texts as a Qwen2, whatever tokenizer.json says.
    save_pretrained(tmp_path / "other", model, tokenizer(r"\s+"))
    model.blocks.attention.out.bias[...] += 0.5
    save_pretrained(tmp_path / "bias", model, own)
    for name in ("other", "bias"):
        assert settings(tmp_path / name)["model_type"] == "llama"
    assert_same_parameters(from_pretrained(tmp_path / "bias"), model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        (
            {"qk_norm": True, "sliding_window": 9},
            "mistral needs qk_norm=False, not True; qwen3 needs sliding_window=None, not 9",
        ),
        (
            {"gated": False, "activation": "fatrelu", "activation_threshold": 0.1},
            "arcee needs activation=relu or silu or relu2, not fatrelu; "
            "sparsellama needs gated=True, not False",
        ),
        (
            {"norm": "layer"},
            "model: llama needs norm=rms, not layer; nemotron needs gated=False, not True",
        ),
        ({"activation": "drelu", "embed_scale": 2.0}, "bamboo needs embed_scale=1.0, not 2.0"),
        ({"rotary_fraction": 0.5}, "llama needs rotary_fraction=1.0, not 0.5"),
        ({"mlp_bias": True, "logit_scale": 0.5}, "llama needs logit_scale=1.0, not 0.5; minicpm"),
    ],
)
def test_what_no_architecture_expresses_is_one_line(tmp_path, changes, says):
    with pytest.raises(PretrainedError) as error:
        save_pretrained(tmp_path / "new", make(**changes), ByteTokenizer())
    message = str(error.value)
    assert message.startswith("no architecture in Hugging Face's format can express this model: ")
    assert says in message and "\n" not in message
    assert not (tmp_path / "new").exists()

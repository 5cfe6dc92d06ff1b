"""The form of its architecture, and the dtype, in which a model is written and read again.

What transformers computes of its models is recorded; test_transformers asks it, about ours, too.
"""

import json
import logging

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import tokenizers as hf
from flax import nnx
from safetensors.numpy import load_file

from tests import seeds
from tests.errors import relative_error
from tests.twell_jax.models.pretrained import theirs, written
from tests.twell_jax.models.pretrained.small import (
    assert_same_parameters,
    change_config,
    change_tensors,
    config_of,
    make,
)
from tests.twell_jax.models.pretrained.theirs import THEIRS
from tests.twell_jax.models.pretrained.written import MODELS
from twell_jax.data.tokenizers import ByteTokenizer, SubwordTokenizer
from twell_jax.models.pretrained import PretrainedError, from_pretrained, save_pretrained
from twell_jax.models.pretrained.architectures import ARCHITECTURES, SPARSE

forward = nnx.jit(lambda model, tokens: model(tokens)[0])


def tokenizer(splitting=None, normalizer="NFC"):
    """Two tokens; with `splitting` a byte-level BPE that splits by this regular expression."""
    backend = hf.Tokenizer(hf.models.BPE(vocab={"</s>": 0, "a": 1}, merges=[]))
    if splitting:
        in_bytes = hf.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
        split = hf.pre_tokenizers.Split(hf.Regex(splitting), "isolated")
        backend.normalizer = normalizer and getattr(hf.normalizers, normalizer)()
        backend.pre_tokenizer = hf.pre_tokenizers.Sequence([split, in_bytes])
    return SubwordTokenizer(backend, "</s>")


RECORDED = json.loads(theirs.RECORDED.with_suffix(".json").read_text())["models"]
LOGITS = np.load(theirs.RECORDED.with_suffix(".npz"))


def write_recorded(directory, name, **changes):
    theirs.write(directory, name, RECORDED[name]["config"] | changes, RECORDED[name]["shapes"])


def test_all_models_of_transformers_are_recorded():
    assert list(RECORDED) == list(LOGITS) == list(THEIRS)
    kinds = {model["config"]["model_type"] for model in RECORDED.values()}
    own_code = {name for name, known in ARCHITECTURES.items() if known.own_code}
    assert kinds == {name for name in ARCHITECTURES if not name.endswith(SPARSE)} - own_code


@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", THEIRS)
def test_a_model_of_transformers_computes_what_was_recorded_and_is_written_as_it_was(
    tmp_path, name
):
    source, saved = tmp_path / "source", tmp_path / "saved"
    write_recorded(source, name)
    model, kind = from_pretrained(source), RECORDED[name]["config"]["model_type"]
    save_pretrained(saved, model, tokenizer(ARCHITECTURES[kind].splitting))
    kind = "llama" if name == "mistral, no window, SiLU" else kind
    after = config_of(saved)
    assert after["model_type"] == kind
    assert after["architectures"] == RECORDED[kind]["config"]["architectures"]
    old, new = (load_file(path / "model.safetensors") for path in (source, saved))
    assert old.keys() == new.keys()
    for key in old:  # 1 is added to some scales and taken away again, without rounding
        np.testing.assert_array_equal(new[key], old[key])
    for read in (model, from_pretrained(saved)):
        assert relative_error(forward(read, theirs.tokens(name)), LOGITS[name]) < theirs.TOLERANCE


@pytest.mark.parametrize("kind", ["llama", "qwen2"])
def test_released_sparse_models_compute_what_was_recorded_of_a_relu(tmp_path, kind):
    assert RECORDED[kind]["config"]["hidden_act"] == "relu"
    write_recorded(tmp_path / "sparse", kind, model_type=f"{kind}{SPARSE}", hidden_act="silu")
    model = from_pretrained(tmp_path / "sparse")
    assert relative_error(forward(model, theirs.tokens(kind)), LOGITS[kind]) < theirs.TOLERANCE


@pytest.mark.sampled(2)
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
    kept = config_of(directory)
    assert {key: kept[key] for key in config} == config
    old, new = (load_file(path / "model.safetensors") for path in (source, directory))
    assert old.keys() == new.keys()
    for key in old:
        np.testing.assert_array_equal(new[key], old[key])
    # The other reader takes the keys of config.json and the tensors by their published names.
    tokens = seeds.rng().integers(0, written.SHAPE["vocab_size"], 12)
    logits = forward(from_pretrained(directory), tokens[None])
    assert relative_error(logits[0], written.logits(directory, tokens, mlp)) < 1e-5


def test_a_qwen2_is_a_llama_if_its_output_has_a_bias_or_its_tokenizer_is_another(tmp_path):
    model = make(attention_bias=True)
    own = tokenizer(ARCHITECTURES["qwen2"].splitting)
    save_pretrained(tmp_path / "own", model, own)
    assert config_of(tmp_path / "own")["model_type"] == "qwen2"
    assert "model.layers.0.self_attn.o_proj.bias" not in load_file(
        tmp_path / "own/model.safetensors"
    )
    assert_same_parameters(from_pretrained(tmp_path / "own"), model)
    # transformers would split texts as a Qwen2, whatever tokenizer.json says.
    save_pretrained(tmp_path / "other", model, tokenizer(r"\s+"))
    for normalizer in (None, "NFKC"):
        another = tokenizer(ARCHITECTURES["qwen2"].splitting, normalizer)
        save_pretrained(tmp_path / f"{normalizer}", model, another)
    model.blocks.attention.out.bias[...] += 0.5
    save_pretrained(tmp_path / "bias", model, own)
    for name in ("other", "None", "NFKC", "bias"):
        assert config_of(tmp_path / name)["model_type"] == "llama"
    assert_same_parameters(from_pretrained(tmp_path / "bias"), model)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"qk_norm": True, "sliding_window": 9},
         "mistral needs qk_norm=False, not True; qwen3 needs sliding_window=None, not 9"),
        ({"gated": False, "activation": "fatrelu", "activation_threshold": 0.1},
         "arcee needs activation=relu or silu or relu2, not fatrelu; "
         "sparsellama needs gated=True, not False"),
        ({"norm": "layer"},
         "model: llama needs norm=rms, not layer; nemotron needs gated=False, not True"),
        ({"activation": "drelu", "embed_scale": 2.0}, "bamboo needs embed_scale=1.0, not 2.0"),
        ({"rotary_fraction": 0.5}, "llama needs rotary_fraction=1.0, not 0.5"),
        ({"mlp_bias": True, "logit_scale": 0.5}, "llama needs logit_scale=1.0, not 0.5; minicpm"),
    ],
)  # fmt: skip
def test_what_no_architecture_expresses_is_one_line(tmp_path, changes, says):
    with pytest.raises(PretrainedError) as error:
        save_pretrained(tmp_path / "new", make(**changes), ByteTokenizer())
    message = str(error.value)
    assert message.startswith("no architecture in Hugging Face's format can express this model: ")
    assert says in message and "\n" not in message
    assert not (tmp_path / "new").exists()


def stored_dtypes(directory):
    tensors = load_file(directory / "model.safetensors").values()
    return {tensor.dtype.name for tensor in tensors}


def test_another_dtype_is_that_of_the_loaded_model(saved):
    model, directory = saved
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(jnp.bfloat16), nnx.state(model))
    half = from_pretrained(directory, dtype="bfloat16")
    assert (half.config.dtype, half.config.param_dtype) == ("bfloat16", "bfloat16")
    jax.tree.map(np.testing.assert_array_equal, nnx.state(half), rounded)
    assert {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(half))} == {"bfloat16"}
    master = from_pretrained(directory, dtype="bfloat16", param_dtype="float32")
    assert (master.config.dtype, master.config.param_dtype) == ("bfloat16", "float32")
    assert_same_parameters(master, model)


@pytest.mark.parametrize("key", ["dtype", "torch_dtype"])
def test_float16_is_read_as_bfloat16_rounded_once_or_as_float32_exactly(tmp_path, key):
    bits = np.arange(2**16).astype(np.uint16).view(np.float16)
    every = bits[np.isfinite(bits)].reshape(-1, 16)
    save_pretrained(tmp_path, make(vocab_size=len(every)), ByteTokenizer())

    def change(tensors):
        tensors.update({name: tensor.astype(np.float16) for name, tensor in tensors.items()})
        tensors["model.embed_tokens.weight"] = every

    change_tensors(tmp_path, change)
    change_config(tmp_path, torch_dtype="absent")
    change_config(tmp_path, **{key: "float16"})
    for asked, dtype, param_dtype in [
        ({}, "bfloat16", "bfloat16"),
        ({"dtype": "float32"}, "float32", "float32"),
        ({"param_dtype": "float32"}, "bfloat16", "float32"),
    ]:
        model = from_pretrained(tmp_path, **asked)
        assert (model.config.dtype, model.config.param_dtype) == (dtype, param_dtype)
        expected = every.astype(np.float32)
        if param_dtype == "bfloat16":  # to the nearest, of two the even one
            words = expected.view(np.uint32)
            rounded = words + 0x7FFF + (words >> 16 & 1)
            expected = (rounded & np.uint32(0xFFFF0000)).view(np.float32)
        embedding = np.asarray(model.embed.embedding[...])
        assert np.isfinite(embedding).all() and embedding.dtype == param_dtype
        np.testing.assert_array_equal(embedding.astype(np.float32), expected)
    with pytest.raises(PretrainedError, match="dtype='float16'; name bfloat16 or float32"):
        from_pretrained(tmp_path, dtype="float16")


@pytest.mark.parametrize("dtype", ["bfloat16", "float32", None])
@pytest.mark.parametrize("param_dtype", ["bfloat16", "float32"])
def test_the_file_has_the_asked_dtype(tmp_path, dtype, param_dtype):
    model = make(param_dtype=param_dtype)
    save_pretrained(tmp_path, model, ByteTokenizer(), dtype=dtype)
    expected = dtype or param_dtype  # as they are
    assert stored_dtypes(tmp_path) == {expected}
    assert config_of(tmp_path)["torch_dtype"] == expected
    rounded = jax.tree.map(lambda p: np.asarray(p).astype(expected), nnx.state(model))
    jax.tree.map(np.testing.assert_array_equal, nnx.state(from_pretrained(tmp_path)), rounded)

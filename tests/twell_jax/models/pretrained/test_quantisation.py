"""Models with 8-bit weights in files, by the convention of compressed-tensors."""

import json
import os

import jax
import ml_dtypes
import numpy as np
import pytest
from flax import nnx
from safetensors.numpy import save_file

from tests import seeds
from tests.commands import call, succeeded
from tests.packages import needed
from tests.twell_jax.configs import VALID
from tests.twell_jax.models.pretrained.small import (
    SMALL,
    assert_same_parameters,
    change_config,
    change_tensors,
    config_of,
    make,
)
from twell_jax import config as config_lib
from twell_jax.config import ConfigError
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.ffn import quantise_mlps
from twell_jax.inference import language_model
from twell_jax.models import sharding
from twell_jax.models.pretrained import (
    PretrainedError,
    from_pretrained,
    quantisation,
    save_pretrained,
)
from twell_jax.models.pretrained import config as pretrained_config
from twell_jax.models.quantised import COVERED, PARTS
from twell_jax.train import init_from

SUBSETS = [("gate", "up"), ("up",), ("key", "down"), PARTS]
MOST = COVERED["fp8-all-but-down"]


def stored(path):
    """The tensors of a file, read byte by byte as safetensors' format says."""
    data = path.read_bytes()
    length = int.from_bytes(data[:8], "little")
    dtypes = {"F32": np.float32, "BF16": ml_dtypes.bfloat16, "F8_E4M3": ml_dtypes.float8_e4m3fn}
    tensors = {}
    for name, entry in json.loads(data[8 : 8 + length]).items():
        if name != "__metadata__":
            start, stop = (8 + length + offset for offset in entry["data_offsets"])
            tensors[name] = np.frombuffer(data[start:stop], dtypes[entry["dtype"]])
            tensors[name] = tensors[name].reshape(entry["shape"])
    return tensors


@pytest.mark.sampled(1)
@pytest.mark.parametrize("projections", SUBSETS, ids="+".join)
def test_a_saved_model_is_read_bit_for_bit(tmp_path, projections):
    model = make(attention_bias=True)
    model.quantise(projections)
    save_pretrained(tmp_path, model, ByteTokenizer(), max_shard_bytes=9000)
    again = from_pretrained(tmp_path)
    assert again.quantised() == tuple(part for part in PARTS if part in projections)
    assert_same_parameters(again, model)
    mesh = sharding.make_mesh((2, 4))
    assert_same_parameters(from_pretrained(tmp_path, mesh=mesh), model)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("changes", "gate"), [({}, "gate"), ({"gated": False, "norm": "layer"}, "up")]
)
def test_numbers_of_live_neurons_are_kept(tmp_path, changes, gate):
    model = make(live_width=True, **changes)
    quantise_mlps(model)
    save_pretrained(tmp_path, model, ByteTokenizer())
    live = np.asarray(model.blocks.mlp.live[...])
    loaded = from_pretrained(tmp_path)
    np.testing.assert_array_equal(loaded.blocks.mlp.live[...], live)
    tensors = stored(tmp_path / "model.safetensors")
    for layer, number in enumerate(live):
        weights = tensors[f"model.layers.{layer}.mlp.{gate}_proj.weight"].astype(np.float32)
        np.testing.assert_array_equal(weights.any(axis=1), np.arange(len(weights)) < number)
    tokens = np.arange(24).reshape(2, 12)
    forward = nnx.jit(lambda model, tokens: model(tokens)[0])
    np.testing.assert_array_equal(forward(loaded, tokens), forward(model, tokens))
    rounded = language_model.in_compute_dtype(loaded)
    assert rounded.blocks.mlp.live[...].dtype == np.int32


def test_files_hold_values_and_scales_by_the_convention(tmp_path):
    model = make()
    exact = {name: np.asarray(getattr(model.blocks.mlp, name)[...]) for name in ("w_up", "w_down")}
    quantise_mlps(model, ("gate", "up", "down"))
    save_pretrained(tmp_path, model, ByteTokenizer(), dtype="bfloat16")
    tensors = stored(tmp_path / "model.safetensors")
    assert tensors["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    for layer in range(2):
        for name, expected in (("up", exact["w_up"][layer]), ("down", exact["w_down"][layer].T)):
            weight = tensors[f"model.layers.{layer}.mlp.{name}_proj.weight"]
            scale = tensors[f"model.layers.{layer}.mlp.{name}_proj.weight_scale"]
            assert weight.dtype == ml_dtypes.float8_e4m3fn and scale.dtype == np.float32
            assert weight.shape == expected.shape and scale.shape == (len(expected), 1)
            np.testing.assert_allclose(scale[:, 0], np.abs(expected).max(1) / 448, rtol=1e-6)
            error = np.abs(weight.astype(np.float32) * scale - expected)
            assert np.all(error <= np.maximum(np.abs(expected) / 16, scale / 1024) * 1.001)
    config = config_of(tmp_path)["quantization_config"]
    group = config["config_groups"]["group_0"]
    assert config["quant_method"] == "compressed-tensors" and config["format"] == "float-quantized"
    eight_bits = {"num_bits": 8, "type": "float", "symmetric": True}
    weights = eight_bits | {"strategy": "channel", "dynamic": False}
    assert weights.items() <= group["weights"].items()
    inputs = eight_bits | {"strategy": "token", "dynamic": True}
    assert inputs.items() <= group["input_activations"].items()


@pytest.mark.peers
@pytest.mark.parametrize("projections", [SUBSETS[0], MOST, PARTS], ids="+".join)
def test_transformers_and_compressed_tensors_compute_the_same(tmp_path, projections):
    torch, transformers, _ = map(needed, ("torch", "transformers", "compressed_tensors"))
    model, tokens = make(), seeds.rng().integers(0, 257, (2, 16))
    model.quantise(projections)
    save_pretrained(tmp_path, model, ByteTokenizer())
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.float32)
    gate = theirs.model.layers[0].mlp.gate_proj
    assert gate.weight.dtype == torch.float8_e4m3fn and gate.weight_scale.shape == (24, 1)
    with torch.no_grad():
        logits = theirs(torch.from_numpy(tokens)).logits
    np.testing.assert_allclose(logits.numpy(), model(tokens)[0], rtol=1e-3, atol=1e-4)


def test_loading_can_quantise(saved):
    model, directory = saved
    for quantise, parts in COVERED.items():
        model.quantise(parts)
        assert_same_parameters(from_pretrained(directory, quantise=quantise), model)
    mesh = sharding.make_mesh((2, 4))
    loaded = from_pretrained(directory, quantise="fp8-all-but-down", mesh=mesh)
    assert_same_parameters(loaded, model)
    head = loaded.unembed.weight[...].values
    assert head.addressable_shards[0].data.shape == (257, 4)  # D over fsdp, as the embedding's
    with pytest.raises(ValueError, match=r"quantise must be 'fp8' .* or None, got 'int4'"):
        from_pretrained(directory, quantise="int4")


@pytest.mark.parametrize("max_shard_bytes", [10**9, 5000])
def test_the_command_quantises_files(tmp_path, max_shard_bytes):
    model, source, out = make(tie_embeddings=False), tmp_path / "from", tmp_path / "to"
    save_pretrained(source, model, ByteTokenizer(), max_shard_bytes=max_shard_bytes)
    (source / "chat_template.jinja").write_text("{{ messages }}")
    ran = succeeded("-m", "twell_jax.quantise", source, out)
    assert ran.stdout == f"model: {out}\n"
    copied = {path.name for path in source.iterdir()}
    assert {path.name for path in out.iterdir()} == copied | {"README.md"}
    for name in copied - {"config.json", "model.safetensors.index.json"}:
        if not name.endswith(".safetensors"):
            assert (out / name).read_bytes() == (source / name).read_bytes()
    assert config_of(out).items() > config_of(source).items()
    quantise_mlps(model)
    assert_same_parameters(from_pretrained(out), model)
    again = call("-m", "twell_jax.quantise", out, tmp_path / "twice")
    assert again.returncode == 1 and "is quantised already" in again.stderr
    full = call("-m", "twell_jax.quantise", source, out)
    assert full.returncode == 1 and "not empty; choose a new directory" in full.stderr


@pytest.mark.parametrize("umask", [0o022, 0o077])
def test_all_files_have_the_rights_that_the_umask_says(tmp_path, umask):
    before = os.umask(umask)
    try:
        save_pretrained(tmp_path / "saved", make(), ByteTokenizer(), max_shard_bytes=9000)
        succeeded("-m", "twell_jax.quantise", tmp_path / "saved", tmp_path / "new")
    finally:
        os.umask(before)
    for directory in ("saved", "new"):
        modes = {path.stat().st_mode & 0o777 for path in (tmp_path / directory).iterdir()}
        assert modes == {0o666 & ~umask}


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    "changes", [{}, {"tie_embeddings": False}, {"gated": False, "norm": "layer"}]
)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 5000])
def test_the_command_quantises_attention_and_the_head(tmp_path, changes, max_shard_bytes):
    model, source, out = make(**changes), tmp_path / "from", tmp_path / "to"
    save_pretrained(source, model, ByteTokenizer(), max_shard_bytes=max_shard_bytes)
    succeeded("-m", "twell_jax.quantise", source, out, "--quantise", "fp8-all-but-down")
    model.quantise(MOST)
    loaded = from_pretrained(out)
    assert_same_parameters(loaded, model)
    assert loaded.config.tie_embeddings is False
    assert config_of(out)["quantization_config"]["ignore"][-1] == r"re:.*\.down_proj$"


def test_a_base_models_files_are_quantised(saved, tmp_path):
    model, directory = saved

    def change(tensors):  # as LlamaModel saves them
        for name in list(tensors):
            tensors[name.removeprefix("model.")] = tensors.pop(name)

    change_tensors(directory, change)
    quantisation.quantise_files(directory, tmp_path / "out", MOST, is_tied=True)
    model.quantise(MOST)
    assert_same_parameters(from_pretrained(tmp_path / "out"), model)


def test_a_quantised_model_generates(saved, tmp_path):
    model, directory = saved
    succeeded("-m", "twell_jax.quantise", directory, tmp_path / "out")
    quantise_mlps(model)
    loaded = language_model.load(tmp_path / "out").model
    assert_same_parameters(loaded, model)
    tokens = seeds.rng().integers(0, 257, (1, 8))
    logits = nnx.jit(lambda model, tokens: model(tokens)[0])
    np.testing.assert_array_equal(logits(loaded, tokens), logits(model, tokens))
    change_config(tmp_path / "out", torch_dtype="bfloat16")
    loaded = language_model.load(tmp_path / "out").model
    dtypes = {leaf.dtype.name for leaf in jax.tree.leaves(nnx.state(loaded))}
    assert dtypes == {"bfloat16", "float8_e4m3fn", "float32"}  # float32: the scales


@pytest.fixture
def eight_bits(saved, tmp_path):
    model, _ = saved
    quantise_mlps(model)
    save_pretrained(tmp_path / "eight", model, ByteTokenizer())
    return tmp_path / "eight"


@pytest.mark.parametrize(
    ("part", "changes", "says"),
    [
        ((), {"format": "int-quantized"}, "format='int-quantized' is not supported"),
        ((), {"quant_method": "fp8"}, "quant_method='fp8' is not supported; it must be 'compress"),
        ((), {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme={'num_bits': 8}"),
        ((), {"config_groups": {}}, "config_groups must be one group, got {}"),
        ((), {"ignore": ["lm_head"]}, r"10 missing: .*k_proj\.weight_scale"),
        ((), {"ignore": ["re:.*self_attn.*"]}, "has lm_head in 8 bits, but tie_word_embeddings"),
        ((), {"ignore": ["lm_head", "re:.*s.1..*", "re:.*attn.*"]}, "the same of all layers"),
        (("weights",), {"num_bits": 4}, r"weights\.num_bits=4 is not supported; it must be 8"),
        (("weights",), {"type": "absent"}, r"weights\.type='int' is not supported"),
        (("weights",), {"strategy": "tensor"}, r"weights\.strategy='tensor'"),
        (("input_activations",), {"dynamic": False}, r"input_activations\.dynamic=False"),
        ((), {"input_activations": None}, "input_activations must be an object, got None"),
        ((), {"config_groups": {"a": 3}}, "config_groups must be an object, got 3"),
        ((), {"config_groups": {"a": {}, "b": ["x" * 999] * 99}}, "one group, got .{1,900}$"),
        ((), {"ignore": "lm_head"}, "ignore must be a list of names, got 'lm_head'"),
        ((), {"ignore": 7}, "ignore must be a list of names, got 7"),
        ((), {"ignore": ["lm_head", None]}, r"ignore must be a list .*, got \['lm_head', None\]"),
        ((), {"ignore": ["re:("]}, r"pattern 're:\(', which cannot be read: unclosed group"),
        ((), {"ignore": ["re:(?!x)"]}, "which cannot be read: look-around, including look-ahead"),
        ((), {"ignore": ["re:" + "x" * 1001]}, "cannot be read: it has more than 1000 characters"),
        ((), {"ignore": [f"re:{i}" for i in range(101)]}, "has 101 patterns; at most 100 are read"),
        (("weights",), {"num_bits": 8.0}, r"weights\.num_bits=8.0 is not supported"),
        (("weights",), {"symmetric": 1}, r"weights\.symmetric=1 is not supported"),
    ],
)
def test_other_quantisations_are_refused(eight_bits, part, changes, says):
    config = config_of(eight_bits)["quantization_config"]
    tree = config["config_groups"]["group_0"] if part else config
    if "input_activations" in changes:
        tree = config["config_groups"]["group_0"]
    for key in part:
        tree = tree[key]
    tree |= changes
    for key in [key for key, value in tree.items() if value == "absent"]:
        del tree[key]
    change_config(eight_bits, quantization_config=config)
    with pytest.raises(PretrainedError, match=says) as error:
        from_pretrained(eight_bits)
    assert "\n" not in str(error.value)


def test_a_pattern_that_python_would_match_for_ever_costs_no_time(eight_bits):
    config = config_of(eight_bits)["quantization_config"]
    before = from_pretrained(eight_bits)
    config["ignore"].append("re:(.|[^!])+!")
    change_config(eight_bits, quantization_config=config)
    assert_same_parameters(from_pretrained(eight_bits), before)


def test_more_layers_than_tensors_are_refused_before_their_patterns_are_matched(
    eight_bits, monkeypatch
):
    monkeypatch.setattr(quantisation, "read", lambda *_: pytest.fail("matched"))
    change_config(eight_bits, num_hidden_layers=3_000_000)
    with pytest.raises(PretrainedError, match=r"says 3000000 layers, but there are only 24 tens"):
        pretrained_config.read(eight_bits, None, None)
    (eight_bits / "model.safetensors").unlink()  # as it is before it is fetched
    with pytest.raises(PretrainedError, match="but no model of more than 10000 is read"):
        pretrained_config.read(eight_bits, None, None)


def test_training_does_not_start_from_8_bits(eight_bits):
    config = config_lib.from_dict(VALID | {"model": SMALL, "init_from": str(eight_bits)})
    with pytest.raises(ConfigError, match=r"init_from: .*has weights in 8 bits, which cannot be"):
        init_from.initial_params(config, ByteTokenizer(), None, None)


def test_tensors_that_are_not_what_the_settings_say_are_named(eight_bits, saved):
    _, directory = saved
    name = "model.layers.1.mlp.up_proj.weight"
    tensors = stored(eight_bits / "model.safetensors")
    tensors[name] = stored(directory / "model.safetensors")[name]
    del tensors["model.layers.0.mlp.gate_proj.weight_scale"]
    save_file(tensors, eight_bits / "model.safetensors")
    with pytest.raises(PretrainedError) as error:
        from_pretrained(eight_bits)
    assert "1 missing: model.layers.0.mlp.gate_proj.weight_scale" in str(error.value)
    assert f"not F8_E4M3: {name} F32" in str(error.value)


def test_a_pattern_matches_the_beginning_of_a_name(eight_bits):
    """As compressed-tensors' `match_name` has it: of the whole name, not of a part in it."""
    config = config_of(eight_bits)["quantization_config"]
    attention = r"re:model\.layers\.\d+\.self_attn"
    change_config(
        eight_bits, quantization_config=config | {"ignore": ["lm_head", attention, "re:.*down"]}
    )
    assert from_pretrained(eight_bits).quantised() == ("gate", "up")
    change_config(
        eight_bits,
        quantization_config=config | {"ignore": ["lm_head", attention, "re:x|down_proj"]},
    )
    with pytest.raises(PretrainedError, match=r"2 missing: .*0\.mlp\.down_proj\.weight_scale"):
        from_pretrained(eight_bits)


def test_weights_that_8_bits_cannot_hold_are_refused(saved, tmp_path):
    _, directory = saved
    name = "model.layers.1.mlp.up_proj.weight"

    def change(tensors):
        tensors[name][2, 3] = np.nan

    change_tensors(directory, change)
    ran = call("-m", "twell_jax.quantise", directory, tmp_path / "out")
    assert ran.returncode == 1 and f"{name}: the weight has 1 elements" in ran.stderr
    assert ran.stderr.count("\n") == 1

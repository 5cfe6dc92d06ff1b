"""Hugging Face directories: round trips, and clear errors."""

import json

import jax
import numpy as np
import optax
import pytest
from flax import nnx
from safetensors.numpy import load_file, save_file

from tests.twell_jax.models.pretrained.small import (
    assert_same_parameters,
    change_config,
    change_tensors,
    config_of,
    make,
)
from twell_jax.data.tokenizers import ByteTokenizer
from twell_jax.models.pretrained import (
    PretrainedError,
    config,
    from_pretrained,
    save_pretrained,
    weights,
)
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer

YARN = {"type": "yarn", "factor": 2, "original_context": 9, "attention_factor": 1.5, "beta_fast": 8}
LLAMA3 = {"type": "llama3", "factor": 2, "original_context": 9, "high_freq_factor": 3}
LINEAR = {"type": "linear", "factor": 2.0}
UNGATED = {"gated": False, "activation": "relu2"}
VARIANTS = [  # the model_type that config.json names, and the changes to the model
    ("llama", {}),
    ("llama", {"layers": 1, "activation": "silu"}),
    ("llama", {"kv_heads": 2, "tie_embeddings": False, "head_size": 6}),
    # not a Qwen2, whose tokenizer is another
    ("llama", {"attention_bias": True, "dtype": "bfloat16", "param_dtype": "bfloat16"}),
    ("llama", {"rope_scaling": LINEAR, "mlp_bias": True, "activation": "relu2"}),
    ("llama", {"rope_scaling": LLAMA3}),
    ("llama", {"rope_scaling": YARN}),
    ("mistral", {"sliding_window": 5, "kv_heads": 2, "rope_scaling": YARN}),
    ("qwen3", {"qk_norm": True, "head_size": 6, "attention_bias": True, "activation": "silu"}),
    ("arcee", UNGATED | {"mlp_bias": True, "attention_bias": True, "tie_embeddings": False}),
    ("nemotron", UNGATED | {"norm": "layer", "rotary_fraction": 0.5, "mlp_bias": True}),
    ("sparsellama", {"activation": "fatrelu", "activation_threshold": 0.01, "mlp_bias": True}),
    ("minicpm", {"embed_scale": 12.0, "residual_scale": 1.4 / 2**0.5, "attention_bias": True,
                 "activation": "fatrelu", "activation_threshold": 0.25}),
    ("bamboo", {"activation": "drelu", "sliding_window": 7}),
]  # fmt: skip


@pytest.mark.sampled(8)
@pytest.mark.parametrize("max_shard_bytes", [10**9, 3000])
@pytest.mark.parametrize(("model_type", "changes"), VARIANTS)
def test_what_is_saved_is_loaded_as_the_same_model(tmp_path, model_type, changes, max_shard_bytes):
    model = make(**changes)
    if model_type == "nemotron":  # scales to which 1 can be added without rounding
        model.norm.scale[...] += 2.0**-7
    save_pretrained(tmp_path, model, ByteTokenizer(), max_shard_bytes=max_shard_bytes)
    assert config_of(tmp_path)["model_type"] == model_type
    loaded = from_pretrained(tmp_path)
    stored = {"dtype": model.config.param_dtype, "kv_heads": model.config.num_kv_heads,
              "head_size": model.config.head_dim}  # fmt: skip
    assert loaded.config == model.config.model_copy(update=stored)
    assert_same_parameters(loaded, model)
    assert (tmp_path / "model.safetensors.index.json").exists() == (max_shard_bytes == 3000)
    for file in tmp_path.glob("*.safetensors"):
        sizes = [array.nbytes for array in load_file(file).values()]
        assert sum(sizes) <= max_shard_bytes or len(sizes) == 1


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    "changes",
    [
        pytest.param({}, marks=pytest.mark.slow),
        {"mlp_bias": True, "activation": "silu"},
        {"gated": False, "mlp_bias": True},
    ],
)
def test_numbers_of_live_neurons_are_kept(tmp_path, changes):
    model = make(live_width=True, **changes)
    save_pretrained(tmp_path, model, ByteTokenizer())
    loaded = from_pretrained(tmp_path)
    assert loaded.config.live_width
    live = model.blocks.mlp.live[...]
    np.testing.assert_array_equal(loaded.blocks.mlp.live[...], live)
    assert loaded.blocks.mlp.live[...].dtype == np.int32
    tokens = np.arange(24).reshape(2, 12)
    forward = nnx.jit(lambda model, tokens: model(tokens)[0])
    np.testing.assert_array_equal(forward(loaded, tokens), forward(model, tokens))

    change_config(tmp_path, live_neurons="absent")  # a key that transformers does not know
    as_llama = from_pretrained(tmp_path)
    assert not as_llama.config.live_width
    np.testing.assert_array_equal(forward(as_llama, tokens), forward(model, tokens))


def test_no_or_all_neurons_of_a_layer_may_be_live(saved):
    _, directory = saved
    change_config(directory, live_neurons=[0, 24])
    _, stored = config.read(directory, None, None)
    assert stored.live == (0, 24)


@pytest.mark.parametrize("numbers", [[3], [3, 25], [3, -1], [3, 2.0], 3, [True, 1]])
def test_numbers_of_live_neurons_that_do_not_fit_are_named(saved, numbers):
    _, directory = saved
    change_config(directory, live_neurons=numbers)
    with pytest.raises(PretrainedError, match=r"live_neurons must be 2 integers from 0 to 24, .*"):
        from_pretrained(directory)


def test_released_sparse_models_use_relu_whatever_hidden_act_says(saved):
    model, directory = saved
    change_config(
        directory, model_type="llama_sparse_relu", architectures=["SparseLlamaForCausalLM"],
        hidden_act="silu", sparsity_gated_mlp=True, sparsity_l1_coeff=2e-5,
        sparsity_new_intermediate_size=None,
    )  # fmt: skip
    loaded = from_pretrained(directory)
    assert loaded.config.activation == "relu" and loaded.config.gated
    assert_same_parameters(loaded, model)

    change_config(directory, sparsity_gated_mlp=False)
    with pytest.raises(PretrainedError, match=r"not of this model: model.layers.0.mlp.gate_proj"):
        from_pretrained(directory)
    change_config(directory, sparsity_gated_mlp=True, sparsity_new_intermediate_size=20)
    with pytest.raises(PretrainedError, match=r"gate_proj.weight \[24, 16\], must be \[20, 16\]"):
        from_pretrained(directory)


@pytest.mark.parametrize("d_ff", [24, 16])  # 16 is square
def test_hybrid_models_of_the_publication_store_down_projections_transposed(tmp_path, d_ff):
    model = make(d_ff=d_ff)
    save_pretrained(tmp_path, model, ByteTokenizer())
    hybrid = {"model_type": "llama_sparse_relu", "sparsity_use_hybrid_kernel": True}
    change_config(tmp_path, **hybrid)
    if d_ff == 24:  # the shape says that these are not
        assert_same_parameters(from_pretrained(tmp_path), model)

    def change(tensors):
        for i in range(2):
            down = f"model.layers.{i}.mlp.down_proj.weight"
            tensors[down] = np.ascontiguousarray(tensors[down].T)

    change_tensors(tmp_path, change)
    assert_same_parameters(from_pretrained(tmp_path), model)


def test_keys_that_are_left_out_mean_what_they_mean_to_transformers(saved):
    _, directory = saved
    for key in ("rope_theta", "rms_norm_eps", "num_key_value_heads", "head_dim", "torch_dtype",
                "hidden_act", "max_position_embeddings"):  # fmt: skip
        change_config(directory, **{key: "absent"})
    config = from_pretrained(directory).config
    assert (config.rope_theta, config.norm_eps, config.context) == (1e4, 1e-6, 2048)
    assert (config.num_kv_heads, config.head_dim) == (4, 4)
    assert (config.dtype, config.activation) == ("float32", "silu")
    change_config(directory, rope_scaling={"rope_type": "default"})
    assert from_pretrained(directory).config.rope_theta == 1e4
    change_config(directory, rope_parameters={"rope_type": "default", "rope_theta": 7e5})
    assert from_pretrained(directory).config.rope_theta == 7e5


@pytest.mark.parametrize("name", ["rope_scaling", "rope_parameters"])
@pytest.mark.parametrize("rest", [{}, {"rope_theta": 3e3}])
def test_the_rope_theta_of_an_object_comes_first(saved, name, rest):
    _, directory = saved
    change_config(directory, rope_theta="absent")
    change_config(directory, **{name: {"rope_type": "default", "rope_theta": 7e5}}, **rest)
    assert from_pretrained(directory).config.rope_theta == 7e5


@pytest.mark.parametrize("of_model", [{}, {"original_max_position_embeddings": 12}])
@pytest.mark.parametrize("of_object", [{}, {"original_max_position_embeddings": 9}])
def test_the_original_context_of_the_model_comes_first(saved, of_model, of_object):
    _, directory = saved
    change_config(directory, rope_scaling={"rope_type": "yarn", "factor": 2.0} | of_object)
    change_config(directory, **of_model)
    originals = *of_model.values(), *of_object.values(), 64
    assert from_pretrained(directory).config.rope_scaling.original_context == originals[0]


def test_tensors_that_say_nothing_new_are_passed_over(saved):
    model, directory = saved

    def change(tensors):
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(2, np.float32)
        if model.config.tie_embeddings:
            tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"]

    change_tensors(directory, change)
    assert_same_parameters(from_pretrained(directory), model)


def test_a_head_that_is_not_the_embedding_to_which_it_is_tied(saved, monkeypatch):
    model, directory = saved
    monkeypatch.setattr(weights, "_ROWS", 100)  # compares in parts, as it does large ones
    head = np.array(model.embed.embedding)
    head[-1, -1] += 1
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": head}))
    with pytest.raises(PretrainedError, match=r"lm_head.weight differs .*tie_word_embeddings=f"):
        from_pretrained(directory)
    change_config(directory, tie_word_embeddings=False)
    np.testing.assert_array_equal(from_pretrained(directory).unembed.kernel[...], head.T)
    change_config(directory, tie_word_embeddings=True)
    change_tensors(directory, lambda tensors: tensors.update({"lm_head.weight": head[:-1]}))
    with pytest.raises(PretrainedError, match=r"lm_head.weight differs"):
        from_pretrained(directory)


@pytest.mark.parametrize(
    ("index", "says"),
    [
        ({}, "has no weight_map"),
        ({"weight_map": {"a": 3}}, "has no weight_map"),
        ({"weight_map": {"a": "x", "b": []}}, "has no weight_map"),
        *(
            ({"weight_map": {"a": place}}, f"names '{place}'; all files must be in")
            for place in ("../model.safetensors", "a/../../b", "/model.safetensors")
        ),
        ({"weight_map": {"a": "pytorch_model.bin"}}, "names 'pytorch_model.bin'; only safetensors"),
    ],
)
def test_an_index_that_names_no_safetensors_of_the_directory(saved, index, says):
    _, directory = saved
    (directory / "model.safetensors").rename(directory.parent / "model.safetensors")
    (directory / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(PretrainedError, match=says):
        from_pretrained(directory)


def test_the_files_of_a_base_model_are_read_if_the_embedding_is_the_head(saved):
    model, directory = saved
    tensors = load_file(directory / "model.safetensors")
    tensors = {name.removeprefix("model."): tensor for name, tensor in tensors.items()}
    save_file(tensors, directory / "model.safetensors")
    assert_same_parameters(from_pretrained(directory), model)
    change_config(directory, tie_word_embeddings=False)
    with pytest.raises(PretrainedError, match=r"has no lm_head.weight. Save .*; if the embedding"):
        from_pretrained(directory)


def test_pickles_are_named_with_what_converts_them(saved):
    _, directory = saved
    (directory / "model.safetensors").unlink()
    for name in ("training_args.bin", "pytorch_model.bin"):
        (directory / name).write_bytes(b"")
    with pytest.raises(PretrainedError, match=r"holds pytorch_model.bin .*AutoModelForCausalLM"):
        from_pretrained(directory)


def test_more_layers_than_tensors_are_refused_before_their_names_are_made(saved):
    _, directory = saved
    change_config(directory, num_hidden_layers=10**12)
    with pytest.raises(PretrainedError, match="says 1000000000000 layers, but there are only 20 "):
        from_pretrained(directory)


@pytest.mark.parametrize("ids", ["x", -1, 1.5, True, {"a": 1}, [[0]], 10**12])
def test_ends_of_text_that_are_no_ids(saved, ids):
    _, directory = saved
    (directory / "generation_config.json").write_text(json.dumps({"eos_token_id": ids}))
    with pytest.raises(PretrainedError, match="eos_token_id must be an id or a list of them"):
        pretrained_tokenizer.load(directory)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"model_type": "gemma"}, "model_type='gemma' is not supported; it must be 'llama'"),
        ({"model_type": "absent"}, "model_type=None is not supported"),
        ({"hidden_act": "gelu"}, "hidden_act='gelu' .* 'relu' or 'silu'"),
        ({"hidden_act": ["relu"]}, r"hidden_act=\['relu'\] is not supported"),
        ({"use_sliding_window": True}, "use_sliding_window=True"),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types='sliding_att"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2}}, "type='dynamic' .*'llama3' or 'yarn'"),
        ({"rope_parameters": {"rope_type": "longrope"}}, "rope_parameters.rope_type='longrope'"),
        ({"rope_scaling": {"type": "linear"}}, "rope_scaling has no factor, which linear needs"),
        ({"rope_scaling": {"type": "linear", "factor": "2"}}, "rope_scaling.factor must be a pos"),
        ({"rope_scaling": {"type": "linear", "factor": 0.5}}, "factor .*greater than or equal"),
        ({"rope_parameters": {"full_attention": {"rope_theta": 1e4}}}, "full_attention: layers w"),
        ({"rope_scaling": {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
        ({"hidden_act": "fatrelu"}, "hidden_act_param must be a positive number, got None"),
        ({"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5 is not supported"),
        ({"quantization_config": {"bits": 4}}, "quantization_config.quant_method=None is"),
        ({"torch_dtype": "float64"}, "dtype='float64'; name bfloat16 or float32"),
        ({"hidden_size": "absent"}, "has no hidden_size"),
        ({"num_key_value_heads": 3}, "model.kv_heads: must divide heads=4, got 3"),
        ({"num_hidden_layers": "two"}, "layers .*integer"),
        ({"rope_scaling": "x"}, "rope_scaling must be an object or null, got 'x'"),
        ({"rope_parameters": [1]}, r"rope_parameters must be an object or null, got \[1\]"),
        ({"rope_scaling": False}, "rope_scaling must be an object or null, got False"),
        ({"sparsity_new_intermediate_size": 0}, "d_ff .*greater than 0"),
        ({"intermediate_size": None}, "d_ff .*integer"),
        ({"dtype": ""}, "dtype=''; name bfloat16 or float32"),
        ({"rope_theta": 0}, "rope_theta .*greater than 0"),
        ({"layer_types": 3}, "layer_types=3"),
        ({"layer_types": ""}, "layer_types=''"),
        ({"layer_types": [["full_attention"]]}, "layer_types="),
    ],
)
def test_what_a_config_must_not_say(saved, changes, says):
    _, directory = saved
    change_config(directory, **changes)
    with pytest.raises(PretrainedError, match=says) as error:
        from_pretrained(directory)
    assert str(error.value).startswith(f"{directory / 'config.json'}: ")
    assert "\n" not in str(error.value)


def test_tensors_that_do_not_fit_are_named(saved):
    _, directory = saved

    def change(tensors):
        del tensors["model.layers.1.mlp.up_proj.weight"]
        tensors["model.layers.0.self_attn.q_norm.weight"] = np.zeros(4, np.float32)
        down = "model.layers.0.mlp.down_proj.weight"
        tensors[down] = np.ascontiguousarray(tensors[down].T)  # neuron-major, as ours is
        tensors["model.norm.weight"] = np.zeros(16, np.int32)

    change_tensors(directory, change)
    with pytest.raises(PretrainedError) as error:
        from_pretrained(directory)
    for part in (
        "1 missing: model.layers.1.mlp.up_proj.weight",
        "1 not of this model: model.layers.0.self_attn.q_norm.weight",
        "1 of a wrong shape: model.layers.0.mlp.down_proj.weight [24, 16], must be [16, 24]",
        "model.norm.weight I32",
    ):
        assert part in str(error.value)


@pytest.mark.parametrize(("part", "count"), [("attention", 8), ("mlp", 6)])
def test_biases_are_all_there_or_not_at_all(saved, part, count):
    _, directory = saved
    change_config(directory, **{f"{part}_bias": True})
    with pytest.raises(PretrainedError, match=rf"{count} missing: .*_proj.bias.*\.\.\."):
        from_pretrained(directory)


@pytest.mark.parametrize("file", ["config.json", "model.safetensors"])
def test_files_that_are_missing_or_broken_are_named(saved, file):
    _, directory = saved
    content = (directory / file).read_bytes()
    deep = "nested too deeply" if file == "config.json" else file
    for broken, says in ((content[: len(content) // 2], file), (b"[" * 100_000, deep)):
        (directory / file).write_bytes(broken)
        with pytest.raises(PretrainedError, match=says):
            from_pretrained(directory)
    (directory / file).unlink()
    with pytest.raises(PretrainedError, match=file):
        from_pretrained(directory)


def test_a_missing_shard_is_named(tmp_path):
    save_pretrained(tmp_path, make(), ByteTokenizer(), max_shard_bytes=20000)
    shard = sorted(tmp_path.glob("model-*"))[1]
    shard.unlink()
    with pytest.raises(PretrainedError, match=shard.name):
        from_pretrained(tmp_path)


def test_what_cannot_be_saved(saved, tmp_path):
    model, directory = saved
    with pytest.raises(PretrainedError, match="not empty"):
        save_pretrained(directory, model, ByteTokenizer())
    with pytest.raises(PretrainedError, match="257 ids, the model only 100"):
        save_pretrained(tmp_path / "new", make(vocab_size=100), ByteTokenizer())
    with pytest.raises(PretrainedError, match=r"dtype must be .* got 'float16'"):
        save_pretrained(tmp_path / "new", model, ByteTokenizer(), dtype="float16")
    assert not (tmp_path / "new").exists()


def test_a_step_on_a_loaded_model_is_compiled_once(tmp_path, caplog):
    save_pretrained(tmp_path, make(layers=1), ByteTokenizer())
    model = from_pretrained(tmp_path)
    optimizer = nnx.Optimizer(model, optax.adam(1e-3), wrt=nnx.Param)

    @nnx.jit
    def counted_step(model, optimizer, tokens):
        optimizer.update(model, nnx.grad(lambda model: model(tokens)[0].mean())(model))

    with jax.log_compiles():
        for _ in range(3):
            counted_step(model, optimizer, np.zeros((2, 5), np.int32))
    assert caplog.text.count("Compiling jit(counted_step)") == 1

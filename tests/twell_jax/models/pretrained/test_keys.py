"""Keys of config.json: what real files have is read, what nobody here knows is refused by name."""

import json

import pytest

from tests.twell_jax.models.pretrained import written
from tests.twell_jax.models.pretrained.written import BAMBOO, FATRELU, MINICPM
from twell_jax.models.pretrained import PretrainedError, config
from twell_jax.models.pretrained.architectures import ARCHITECTURES

# What files of published models have beside their shapes.
REAL = {
    "llama": {
        "_name_or_path": "x", "architectures": ["LlamaForCausalLM"], "attention_bias": False,
        "attention_dropout": 0.0, "bos_token_id": 1, "eos_token_id": [2, 5],
        "is_llama_config": True, "mlp_bias": False, "pretraining_tp": 1, "rope_interleaved": False,
        "use_cache": True, "rope_scaling": None, "torch_dtype": "bfloat16",
        "transformers_version": "4.40.1",
        "transformers.js_config": {"dtype": "q4"}, "max_sequence_length": 2048, "pad_token_id": -1,
    },
    "arcee": {
        "hidden_act": "relu2", "bos_token_id": 128000, "head_dim": 8, "pad_token_id": 128004,
        "rope_scaling": {
            "beta_fast": 32.0, "beta_slow": 1.0, "factor": 2.0, "mscale": 1.0, "rope_type": "yarn",
            "original_max_position_embeddings": 32, "truncate": True,
        },
    },
    "mistral": {"head_dim": 8, "sliding_window": None, "dtype": "float32"},
    "bamboo": BAMBOO,
    "minicpm": MINICPM
    | {"auto_map": {"AutoConfig": "configuration_minicpm.MiniCPMConfig"}, "mup_denominator": 32,
       "num_experts": 0, "num_experts_per_tok": 0},
    "sparsellama": FATRELU,
    "nemotron": {
        "hidden_act": "relu2", "norm_eps": 1e-5, "partial_rotary_factor": 0.5, "kv_channels": 4,
    },
    "qwen2": {
        "max_window_layers": 21, "sliding_window": 131072, "use_mrope": False,
        "use_sliding_window": False, "layer_types": ["full_attention"] * 2,
        "rope_scaling": {
            "factor": 4.0, "original_max_position_embeddings": 32768, "type": "yarn",
            "finetuned": True,
        },
    },
    "qwen3": {
        "head_dim": 8, "attention_bias": False, "max_window_layers": 36, "sliding_window": None,
        "use_sliding_window": False,
    },
    "llama_sparse_relu": {
        "sparsity_gated_mlp": True, "sparsity_new_intermediate_size": None,
        "sparsity_l1_coeff": 2e-5,
        "sparsity_use_hybrid_kernel": False, "sparsity_mlp_execution_logic": "training",
        "sparsity_tokens_until_dead": 1000, "sparsity_do_track": True, "hidden_act": "silu",
    },
    "qwen2_sparse_relu": {"sparsity_baseline_run": False, "sliding_window": 4096},
}  # fmt: skip
# What transformers 4 wrote of any model whose settings were all to be in the file.
ALL = {
    "add_cross_attention": False, "bad_words_ids": None, "chunk_size_feed_forward": 0,
    "cross_attention_hidden_size": None, "diversity_penalty": 0.0, "do_sample": False,
    "early_stopping": False, "encoder_no_repeat_ngram_size": 0, "finetuning_task": None,
    "id2label": {"0": "LABEL_0"}, "is_decoder": False, "is_encoder_decoder": False,
    "label2id": {"LABEL_0": 0}, "length_penalty": 1.0, "max_length": 20, "min_length": 0,
    "no_repeat_ngram_size": 0, "num_beam_groups": 1, "num_beams": 1, "num_return_sequences": 1,
    "output_attentions": False, "output_hidden_states": False, "output_scores": False,
    "problem_type": None, "pruned_heads": {}, "remove_invalid_values": False,
    "repetition_penalty": 1.0, "return_dict": True, "return_dict_in_generate": False,
    "temperature": 1.0, "tf_legacy_loss": False, "tie_encoder_decoder": False, "top_k": 50,
    "top_p": 1.0, "torchscript": False, "typical_p": 1.0, "use_bfloat16": False,
}  # fmt: skip


def read(directory, **changes):
    (directory / "config.json").write_text(json.dumps(written.SHAPE | changes))
    return config.read(directory, None, None)[0]


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_what_files_of_published_models_have_is_read(tmp_path, name):
    settings = {"model_type": name} | REAL[name]
    assert read(tmp_path, **ALL | settings) == read(tmp_path, **settings)


@pytest.mark.parametrize("name", ARCHITECTURES)
@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("final_logit_softcapping", 30.0),
        ("attention_multiplier", 0.5),
        ("no_rope_layers", [1, 0]),
        ("dual_chunk_attention_config", {"chunk_size": 8}),
        ("of_next_year", False),
    ],
)
def test_a_key_that_is_not_known_is_refused_by_its_name(tmp_path, name, key, value):
    settings = {"model_type": name} | REAL[name]
    with pytest.raises(PretrainedError, match=rf"config.json: {key}: not known, and may change"):
        read(tmp_path, **settings, **{key: value})
    assert read(tmp_path, **settings, **{key: None}) == read(tmp_path, **settings)


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"sliding_window": 4096}, "sliding_window: not known"),
        ({"scale_emb": 12}, "scale_emb: not known"),
        ({"sparsity_use_hybrid_kernel": True}, "sparsity_use_hybrid_kernel: not known"),
        ({"rope_scaling": {"rope_type": "default", "mrope_section": [1, 1]}},
         "rope_scaling.mrope_section: not known"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2, "long_factor": [1]}},
         "rope_parameters.long_factor: not known"),
        ({"use_mrope": True}, "use_mrope=True is not supported; it must be False"),
        ({"rope_interleaved": True}, "rope_interleaved=True is not supported"),
        ({"pruned_heads": {"0": [1]}}, "pruned_heads={'0': .*is not supported"),
        ({"is_encoder_decoder": True}, "is_encoder_decoder=True is not supported"),
        ({f"a{i}\n": 1 for i in range(9)}, r"a0\\n, a1\\n, a2\\n, a3\\n, a4\\n and 4 more: not k"),
    ],
)  # fmt: skip
def test_what_a_llama_must_not_have(tmp_path, changes, says):
    with pytest.raises(PretrainedError, match=says) as error:
        read(tmp_path, model_type="llama", **changes)
    assert "\n" not in str(error.value)

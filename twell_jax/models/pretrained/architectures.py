"""The architectures that can be read and written: what each `model_type` of Hugging Face means.

A config.json leaves out what its class in transformers has as a default, and classes compute some
things whatever config.json says. Both are here, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from twell_jax.config.model import ActivationName

# What `hidden_act` means, where it means what it says.
_ACTIVATIONS: dict[str, ActivationName] = {
    "relu": "relu",
    "silu": "silu",
    "relu2": "relu2",
    "fatrelu": "fatrelu",
}

# Qwen2's attention always has biases, except in the output projection.
_OUT_BIAS = "blocks.attention.out.bias"


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` says beyond the keys of its config.json.

    Attributes:
      class_name: of its language model.
      defaults: the values of keys that config.json leaves out.
      always: the values of keys that it does not read, or not as they are.
      activations: ours for each `hidden_act` that is supported.
      gated: whether its feed-forward blocks have gates.
      norm: its norms, as in `ModelConfig`. Files hold the scale of a layer norm minus 1.
      eps_key: the key of their epsilon.
      partial_rotary: whether it may rotate a share of a head, `partial_rotary_factor`.
      qk_norm: whether each head's queries and keys are normed.
      windowed: whether all layers attend to a window, `sliding_window`.
      scaled: whether it has the scales of MiniCPM: `scale_emb`, `scale_depth`, `dim_model_base`.
      absent: names of our parameters that its files lack and that are zero.
      passed_over: parts of the names of tensors that are not read.
      has_threshold: whether its weights were trained for a FATReLU, whatever `hidden_act` says.
      own_code: whether its class is code beside its weights and no part of transformers.
      ignored: keys of its own in config.json that change no output.
      splitting: the regular expression by which transformers splits a text into words, whatever
        tokenizer.json says; None if that decides.
    """

    class_name: str
    defaults: Mapping[str, Any]
    always: Mapping[str, Any] = field(default_factory=dict)
    activations: Mapping[str, ActivationName] = field(default_factory=lambda: _ACTIVATIONS)
    gated: bool = True
    norm: Literal["rms", "layer"] = "rms"
    eps_key: str = "rms_norm_eps"
    partial_rotary: bool = False
    qk_norm: bool = False
    windowed: bool = False
    scaled: bool = False
    absent: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    has_threshold: bool = False
    own_code: bool = False
    ignored: frozenset[str] = frozenset()
    splitting: str | None = None

    @property
    def scale_offset(self) -> float:
        """What is added to the scales of norms as they are in files."""
        return 1.0 if self.norm == "layer" else 0.0

    @property
    def hidden_acts(self) -> dict[ActivationName, str]:
        """The `hidden_act` of each activation that its class computes; transformers' lack one."""
        found = {ours: theirs for theirs, ours in self.activations.items()}
        return {key: found[key] for key in found if key != "fatrelu" or self.own_code}


def words(text: str) -> frozenset[str]:
    """The words of a text; a set of many keys is easier to read so."""
    return frozenset(text.split())


_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "head_dim": None,
    "attention_bias": False,
    "mlp_bias": False,
    "num_key_value_heads": None,
}
_LLAMA = Architecture("LlamaForCausalLM", _COMMON | {"max_position_embeddings": 2048})
_QWEN2 = Architecture(
    "Qwen2ForCausalLM",
    _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": None},
    {"attention_bias": True, "mlp_bias": False},
    absent=(_OUT_BIAS,),
    splitting=r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+",
)
_QWEN3 = Architecture(
    "Qwen3ForCausalLM",
    _COMMON
    | {
        "max_position_embeddings": 32768,
        "num_key_value_heads": 32,
        "head_dim": 128,
        "sliding_window": None,
    },
    {"mlp_bias": False},
    qk_norm=True,
)
_MISTRAL = Architecture(
    "MistralForCausalLM",
    _COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    {"attention_bias": False, "mlp_bias": False},
    windowed=True,
)
# A Mistral with another block. Files of TurboSparse also hold predictors of active neurons.
_BAMBOO = replace(
    _MISTRAL,
    class_name="BambooForCausalLM",
    activations={"relu": "drelu"},
    passed_over=(".mlp.predictor.",),
    own_code=True,
)
_ARCEE = Architecture(
    "ArceeForCausalLM",
    _COMMON | {"max_position_embeddings": 4096, "hidden_act": "relu2", "rms_norm_eps": 1e-5},
    gated=False,
)
_NEMOTRON = Architecture(
    "NemotronForCausalLM",
    _COMMON
    | {
        "max_position_embeddings": 4096,
        "hidden_act": "relu2",
        "norm_eps": 1e-5,
        "initializer_range": 0.0134,
        "partial_rotary_factor": 0.5,
    },
    gated=False,
    norm="layer",
    eps_key="norm_eps",
    partial_rotary=True,
)
# MiniCPM's class is code beside its weights, which is never run; later versions of transformers
# have one of their own.
_MINICPM = Architecture(
    "MiniCPMForCausalLM",
    _COMMON | {"max_position_embeddings": 2048, "tie_word_embeddings": True},
    {"mlp_bias": False},
    scaled=True,
    own_code=True,
    ignored=words("mup_denominator"),
)

# arXiv 2402.13516
_PROSPARSE = replace(_LLAMA, class_name="SparseLlamaForCausalLM", has_threshold=True, own_code=True)

# The checkpoints released with arXiv 2603.23198 have a model_type that ends like this. They keep
# hidden_act="silu" and use ReLU regardless.
SPARSE = "_sparse_relu"
_OF_SPARSE = words(
    """
    sparsity_use_hybrid_kernel sparsity_l0_cutoff sparsity_l0_cutoff_period
    sparsity_mlp_execution_logic sparsity_do_track sparsity_baseline_run sparsity_reinitialize
    sparsity_train_batch_size sparsity_per_device_train_batch_size sparsity_max_seq_len
    sparsity_tokens_until_dead sparsity_l1_coeff sparsity_start_warmup_step
    sparsity_end_warmup_step
    """
)

ARCHITECTURES = {
    "llama": _LLAMA,
    "arcee": _ARCEE,
    "bamboo": _BAMBOO,
    "minicpm": _MINICPM,
    "mistral": _MISTRAL,
    "nemotron": _NEMOTRON,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
    "sparsellama": _PROSPARSE,
} | {
    f"{name}{SPARSE}": replace(
        released, always={**released.always, "hidden_act": "relu"}, ignored=_OF_SPARSE
    )
    for name, released in (("llama", _LLAMA), ("qwen2", _QWEN2))
}

# A model is written as the first of these that can express it. A Qwen2 comes before a Llama, which
# could express it, too: with a bias of zeros.
WRITTEN = (
    "qwen2", "llama", "mistral", "qwen3", "arcee", "nemotron", "sparsellama", "minicpm", "bamboo",
)  # fmt: skip

"""The architectures that can be read: what each `model_type` of Hugging Face means.

A config.json leaves out what its class in transformers has as a default, and classes compute some
things whatever config.json says. Both are here, and nowhere else.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

# Qwen2's attention always has biases, except in the output projection.
_OUT_BIAS = "blocks.attention.out.bias"


@dataclass(frozen=True)
class Architecture:
    """What a `model_type` says beyond the keys of its config.json.

    Attributes:
      defaults: the values of keys that config.json leaves out.
      always: the values of keys that it does not read, or not as they are.
      qk_norm: whether each head's queries and keys are normed.
      windowed: whether all layers attend to a window, `sliding_window`.
      scaled: whether it has the scales of MiniCPM: `scale_emb`, `scale_depth`, `dim_model_base`.
      absent: names of our parameters that its files lack and that are zero.
    """

    defaults: Mapping[str, Any]
    always: Mapping[str, Any] = field(default_factory=dict)
    qk_norm: bool = False
    windowed: bool = False
    scaled: bool = False
    absent: tuple[str, ...] = ()


_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "head_dim": None,
    "attention_bias": False,
    "num_key_value_heads": None,
}
_LLAMA = Architecture(_COMMON | {"max_position_embeddings": 2048})
_QWEN2 = Architecture(
    _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32},
    {"attention_bias": True},
    absent=(_OUT_BIAS,),
)
_QWEN3 = Architecture(
    _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128},
    qk_norm=True,
)
_MISTRAL = Architecture(
    _COMMON | {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096},
    {"attention_bias": False},
    windowed=True,
)
# MiniCPM's class is code beside its weights, which is never run; later versions of transformers
# have one of their own.
_MINICPM = Architecture(
    _COMMON | {"max_position_embeddings": 2048, "tie_word_embeddings": True}, scaled=True
)

# The checkpoints released with arXiv 2603.23198 have a model_type that ends like this. They keep
# hidden_act="silu" and use ReLU regardless.
SPARSE = "_sparse_relu"

ARCHITECTURES = {
    "llama": _LLAMA,
    "mistral": _MISTRAL,
    "minicpm": _MINICPM,
    "qwen2": _QWEN2,
    "qwen3": _QWEN3,
} | {
    f"{name}{SPARSE}": replace(released, always={**released.always, "hidden_act": "relu"})
    for name, released in (("llama", _LLAMA), ("qwen2", _QWEN2))
}

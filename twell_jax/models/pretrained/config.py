"""Converts config.json of Hugging Face models to `ModelConfig` and back."""

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from twell_jax.config import ModelConfig
from twell_jax.ffn import Activation
from twell_jax.models.pretrained import rope
from twell_jax.models.pretrained.architectures import ARCHITECTURES, SPARSE, Architecture
from twell_jax.models.pretrained.json_file import (
    PretrainedError,
    first,
    positive,
    read_json,
    unsupported,
)

_DTYPES = ("bfloat16", "float32")
# What a model of a dtype that we do not compute in is read as: 16 bits remain 16, which is what the
# kernels take. bfloat16 holds the range of float16, so nothing overflows; its values are rounded.
_READ_AS = {"float16": "bfloat16"}

# Keys for which the model supports these values alone; the first is the default.
_FIXED = {
    "mlp_bias": (False,),
    "use_sliding_window": (False,),
    "quantization_config": (None,),
    "pretraining_tp": (1,),
    "num_experts": (None, 0),
    "sparse_config": (None,),
}

# What transformers' Llama cannot express: keys of ours, and the only value that it has.
_LLAMA_ONLY = {
    "gated": True,
    "qk_norm": False,
    "sliding_window": None,
    "embed_scale": 1.0,
    "residual_scale": 1.0,
    "logit_scale": 1.0,
}


@dataclass(frozen=True)
class Stored:
    """How the files hold the parameters of a `Transformer`, beyond what its configuration says.

    Attributes:
      absent: names of parameters that the files lack and that are zero.
      hybrid: whether a model saved them that multiplied by the publication's hybrid kernel.
    """

    absent: tuple[str, ...] = ()
    hybrid: bool = False


def read(directory: Path, dtype: str | None, param_dtype: str | None) -> tuple[ModelConfig, Stored]:
    """Reads config.json; `dtype` and `param_dtype` are as in `from_pretrained`.

    Returns:
      The configuration, and how the files hold the parameters.

    Raises:
      PretrainedError: the file is missing or broken, or `Transformer` does not support the model.
    """
    path = directory / "config.json"
    tree = read_json(path)
    name = str(tree.get("model_type"))
    if name not in ARCHITECTURES:
        raise unsupported(path, "model_type", tree.get("model_type"), ARCHITECTURES)
    architecture = ARCHITECTURES[name]
    for key, values in _FIXED.items():
        if tree.get(key, values[0]) not in values:
            raise unsupported(path, key, tree[key], values)
    kinds = first(tree.get("layer_types"), [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise unsupported(path, "layer_types", kind, ["full_attention"])
    given = {**architecture.defaults, **tree, **architecture.always}
    if given["hidden_act"] not in get_args(Activation):
        raise unsupported(path, "hidden_act", given["hidden_act"], get_args(Activation))
    if dtype is None:
        dtype = first(tree.get("dtype"), tree.get("torch_dtype"), "float32")
        dtype = _READ_AS.get(str(dtype), dtype)
    if dtype not in _DTYPES:
        raise PretrainedError(f"{path}: dtype={dtype!r}; name bfloat16 or float32 to load it as")
    try:
        config = _config(path, architecture, given, dtype, param_dtype or dtype)
    except KeyError as error:
        raise PretrainedError(f"{path}: has no {error.args[0]}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise PretrainedError(f"{path}: {key} {problem['msg']}".replace("  ", " ")) from None
    hybrid = name.endswith(SPARSE) and config.gated and tree.get("sparsity_use_hybrid_kernel")
    return config, Stored(architecture.absent, bool(hybrid))


def _config(
    path: Path, architecture: Architecture, given: dict[str, Any], dtype: str, param_dtype: str
) -> ModelConfig:
    theta, scaling = rope.read(path, given)
    scales = _scales(path, given) if architecture.scaled else {}
    return ModelConfig(
        vocab_size=given["vocab_size"],
        context=given["max_position_embeddings"],
        d_model=given["hidden_size"],
        layers=given["num_hidden_layers"],
        heads=given["num_attention_heads"],
        kv_heads=given["num_key_value_heads"],
        head_size=given["head_dim"],
        attention_bias=given["attention_bias"],
        qk_norm=architecture.qk_norm,
        sliding_window=given["sliding_window"] if architecture.windowed else None,
        d_ff=first(given.get("sparsity_new_intermediate_size"), given["intermediate_size"]),
        activation=given["hidden_act"],
        gated=given.get("sparsity_gated_mlp", True),
        tie_embeddings=given["tie_word_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        norm_eps=given["rms_norm_eps"],
        init_scale=given["initializer_range"],
        dtype=dtype,
        param_dtype=param_dtype,
        **scales,
    )


def _scales(path: Path, given: dict[str, Any]) -> dict[str, float]:
    """MiniCPM's: its files name the depth and the width of the model that it was tuned on."""
    keys = ("scale_emb", "scale_depth", "dim_model_base", "num_hidden_layers", "hidden_size")
    embed, depth, base_width, layers, width = (positive(path, key, given[key]) for key in keys)
    return {
        "embed_scale": embed,
        "residual_scale": depth / math.sqrt(layers),
        "logit_scale": base_width / width,
    }


def to_dict(config: ModelConfig, dtype: str, eot_id: int) -> dict[str, Any]:
    """The content of config.json for a model whose parameters are stored as `dtype`.

    Raises:
      PretrainedError: transformers' Llama cannot express the model or the dtype.
    """
    for key, wanted in _LLAMA_ONLY.items():
        if (value := getattr(config, key)) != wanted:
            raise PretrainedError(
                f"{key}={value}: transformers' Llama cannot express it; it must be {wanted}"
            )
    if dtype not in _DTYPES:
        raise PretrainedError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
    scaling = config.rope_scaling
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_act": config.activation,
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "intermediate_size": config.d_ff,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope.to_dict(scaling),
        "rms_norm_eps": config.norm_eps,
        "initializer_range": config.init_scale,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eot_id,
    }


def write(directory: Path, tree: dict[str, Any]) -> None:
    """Writes config.json, and generation_config.json with its special tokens."""
    ends = {key: tree[key] for key in ("bos_token_id", "eos_token_id")}
    ends["pad_token_id"] = tree["eos_token_id"]
    for name, content in (("config", tree), ("generation_config", ends)):
        (directory / f"{name}.json").write_text(json.dumps(content, indent=2) + "\n")


def stop_ids(directory: Path) -> tuple[int, ...]:
    """The ids of the tokens that end a text; none if the files do not say.

    Raises:
      PretrainedError: a file cannot be read, or names something other than ids.
    """
    for name in ("generation_config.json", "config.json"):
        path = directory / name
        found = read_json(path).get("eos_token_id") if path.exists() else None
        if found is None:
            continue
        ids = found if isinstance(found, list) else [found]
        if not all(type(i) is int and 0 <= i < 2**31 for i in ids):
            raise PretrainedError(f"{path}: eos_token_id must be an id or a list of them: {ids!r}")
        return tuple(ids)
    return ()

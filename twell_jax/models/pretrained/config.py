"""Converts config.json of Hugging Face models to `ModelConfig` and back."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from twell_jax.config import ModelConfig
from twell_jax.ffn import Activation

# The values of keys that config.json leaves out: the defaults of transformers' LlamaConfig and
# Qwen2Config.
_COMMON = {
    "hidden_act": "silu",
    "rms_norm_eps": 1e-6,
    "tie_word_embeddings": False,
    "initializer_range": 0.02,
    "head_dim": None,
    "attention_bias": False,
}
_DEFAULTS = {
    "llama": _COMMON | {"max_position_embeddings": 2048, "num_key_value_heads": None},
    "qwen2": _COMMON | {"max_position_embeddings": 32768, "num_key_value_heads": 32},
}
# Qwen2's attention always has biases, except in the output projection.
_OUT_BIAS = "blocks.attention.out.bias"

_ROPE_THETA = 1e4
_DTYPES = ("bfloat16", "float32")
# What a model of a dtype that we do not compute in is read as: 16 bits remain 16, which is what the
# kernels take. bfloat16 holds the range of float16, so nothing overflows; its values are rounded.
_READ_AS = {"float16": "bfloat16"}

# Keys for which the model supports only the default value.
_FIXED = {
    "mlp_bias": False,
    "use_sliding_window": False,
    "quantization_config": None,
    "pretraining_tp": 1,
}

# The checkpoints released with arXiv 2603.23198 have a model_type that ends like this.
_SPARSE = "_sparse_relu"


@dataclass(frozen=True)
class Stored:
    """How the files hold the parameters of a `Transformer`, beyond what its configuration says.

    Attributes:
      absent: names of parameters that the files lack and that are zero.
      hybrid: whether a model saved them that multiplied by the publication's hybrid kernel.
    """

    absent: tuple[str, ...] = ()
    hybrid: bool = False


class PretrainedError(ValueError):
    """A directory that cannot be loaded, or a model that cannot be saved; the message says why."""


def read(directory: Path, dtype: str | None, param_dtype: str | None) -> tuple[ModelConfig, Stored]:
    """Reads config.json; `dtype` and `param_dtype` are as in `from_pretrained`.

    Returns:
      The configuration, and how the files hold the parameters.

    Raises:
      PretrainedError: the file is missing or broken, or `Transformer` does not support the model.
    """
    path = directory / "config.json"
    tree = read_json(path)
    model_type = str(tree.get("model_type"))
    family, sparse = model_type.removesuffix(_SPARSE), model_type.endswith(_SPARSE)
    if family not in _DEFAULTS:
        supported = [name + suffix for name in _DEFAULTS for suffix in ("", _SPARSE)]
        raise _unsupported(path, "model_type", tree.get("model_type"), supported)
    for key, value in _FIXED.items():
        if tree.get(key, value) != value:
            raise _unsupported(path, key, tree[key], [value])
    kinds = _first(tree.get("layer_types"), [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise _unsupported(path, "layer_types", kind, ["full_attention"])
    given = _DEFAULTS[family] | tree
    # The released sparse models keep hidden_act="silu" and use ReLU regardless.
    activation = "relu" if sparse else given["hidden_act"]
    if activation not in get_args(Activation):
        raise _unsupported(path, "hidden_act", activation, get_args(Activation))
    if dtype is None:
        dtype = _first(tree.get("dtype"), tree.get("torch_dtype"), "float32")
        dtype = _READ_AS.get(str(dtype), dtype)
    if dtype not in _DTYPES:
        raise PretrainedError(f"{path}: dtype={dtype!r}; name bfloat16 or float32 to load it as")
    try:
        config = ModelConfig(
            vocab_size=given["vocab_size"],
            context=given["max_position_embeddings"],
            d_model=given["hidden_size"],
            layers=given["num_hidden_layers"],
            heads=given["num_attention_heads"],
            kv_heads=given["num_key_value_heads"],
            head_size=given["head_dim"],
            attention_bias=family == "qwen2" or given["attention_bias"],
            d_ff=_first(tree.get("sparsity_new_intermediate_size"), given["intermediate_size"]),
            activation=activation,
            gated=tree.get("sparsity_gated_mlp", True),
            tie_embeddings=given["tie_word_embeddings"],
            rope_theta=_rope_theta(path, tree),
            norm_eps=given["rms_norm_eps"],
            init_scale=given["initializer_range"],
            dtype=dtype,
            param_dtype=param_dtype or dtype,
        )
        hybrid = sparse and config.gated and bool(tree.get("sparsity_use_hybrid_kernel"))
        return config, Stored((_OUT_BIAS,) if family == "qwen2" else (), hybrid)
    except KeyError as error:
        raise PretrainedError(f"{path}: has no {error.args[0]}") from None
    except ValidationError as error:
        first = error.errors()[0]
        key = ".".join(map(str, first["loc"]))
        raise PretrainedError(f"{path}: {key} {first['msg']}".replace("  ", " ")) from None


def to_dict(config: ModelConfig, dtype: str, eot_id: int) -> dict[str, Any]:
    """The content of config.json for a model whose parameters are stored as `dtype`.

    Raises:
      PretrainedError: transformers' Llama cannot express the model or the dtype.
    """
    if not config.gated:
        raise PretrainedError("gated=False: transformers' Llama has gated feed-forward blocks only")
    if dtype not in _DTYPES:
        raise PretrainedError(f"dtype must be one of {', '.join(_DTYPES)}, got {dtype!r}")
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


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      PretrainedError: the file cannot be read or holds no JSON object.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise PretrainedError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise PretrainedError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise PretrainedError(f"{path}: not valid JSON (nested too deeply)") from None
    if not isinstance(tree, dict):
        raise PretrainedError(f"{path}: must hold an object")
    return tree


def _rope_theta(path, tree):
    # transformers 5 writes rope_parameters; earlier versions wrote rope_theta and rope_scaling, and
    # the earliest called the latter's rope_type just type. The theta of an object comes first.
    fixed = {"rope_type": "default", "type": "default", "partial_rotary_factor": 1.0}
    thetas = []
    for name in ("rope_scaling", "rope_parameters"):
        rope = _first(tree.get(name), {})
        if not isinstance(rope, dict):
            raise PretrainedError(f"{path}: {name} must be an object or null, got {rope!r}")
        for key, value in fixed.items():
            if rope.get(key, value) != value:
                raise _unsupported(path, f"{name}.{key}", rope[key], [value])
        thetas.append(rope.get("rope_theta"))
    return _first(*thetas, tree.get("rope_theta"), _ROPE_THETA)


def _first(*values):
    """The first value that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


def _unsupported(path, key, value, supported):
    allowed = " or ".join(repr(value) for value in supported)
    return PretrainedError(f"{path}: {key}={value!r} is not supported; it must be {allowed}")

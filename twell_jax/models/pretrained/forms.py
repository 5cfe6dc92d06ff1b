"""The form in which a model is written: an architecture that can express it, and its config.json.

What an architecture can express follows from how it is read: `architectures` has all of it.
"""

import json
import math
from operator import attrgetter
from pathlib import Path
from typing import Any

import jax.numpy as jnp

from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.models.pretrained import companions, rope
from twell_jax.models.pretrained import tokenizer as tokenizer_file
from twell_jax.models.pretrained.architectures import ARCHITECTURES, WRITTEN, Architecture
from twell_jax.models.pretrained.config import DTYPES, LIVE, read
from twell_jax.models.pretrained.json_file import PretrainedError, read_json
from twell_jax.models.transformer import Transformer

_SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


def choose(model: Transformer, tokenizer: Tokenizer) -> str:
    """The `model_type` that a model is written as, with the tokenizer that it was trained with.

    Raises:
      PretrainedError: no architecture can express the model. The line says what those need that
        come nearest.
    """
    lacks: dict[str, list[str]] = {}
    for name in WRITTEN:
        architecture = ARCHITECTURES[name]
        lacks[name] = [
            f"{key}={' or '.join(map(str, values))}, not {value}"
            for key, values in _wanted(architecture).items()
            if (value := getattr(model.config, key)) not in values
        ]
        lacks[name] += [f"zeros as {path}" for path in architecture.absent if _any(model, path)]
        if architecture.splitting and not tokenizer_file.splits_by(
            tokenizer, architecture.splitting
        ):
            lacks[name].append("its own tokenizer")
        if not lacks[name]:
            return name
    fewest = min(map(len, lacks.values()))
    nearest: dict[str, str] = {}  # the first of those that need the same
    for name, needs in lacks.items():
        if len(needs) == fewest:
            nearest.setdefault(", ".join(needs), name)
    said = "; ".join(f"{name} needs {needs}" for needs, name in nearest.items())
    raise PretrainedError(
        f"no architecture in Hugging Face's format can express this model: {said}"
    )


def _wanted(architecture: Architecture) -> dict[str, tuple[Any, ...]]:
    """The values that an architecture can express, for each key that not all take as it is."""
    biases = ("attention_bias", "mlp_bias")
    wanted: dict[str, tuple[Any, ...]] = {
        key: (architecture.always[key],) for key in biases if key in architecture.always
    }
    wanted |= {
        "gated": (architecture.gated,),
        "activation": tuple(architecture.hidden_acts),
        "norm": (architecture.norm,),
        "qk_norm": (architecture.qk_norm,),
    }
    if not architecture.windowed:
        wanted["sliding_window"] = (None,)
    if not architecture.partial_rotary:
        wanted["rotary_fraction"] = (1.0,)
    if not architecture.scaled:
        wanted |= dict.fromkeys(("embed_scale", "residual_scale", "logit_scale"), (1.0,))
    return wanted


def _any(model: Transformer, path: str) -> bool:
    """Whether a parameter has a value that is not zero."""
    parameter = attrgetter(path)(model)
    return parameter is not None and bool(jnp.any(parameter[...]))


def to_dict(
    name: str, config: ModelConfig, dtype: str, eot_id: int, live: list[int] | None = None
) -> dict[str, Any]:
    """The content of config.json for a model whose parameters are stored as `dtype`.

    `name` is its `model_type`, as `choose` says; `live` is the number of live neurons of each
    layer, if it has such numbers.

    Raises:
      PretrainedError: the format has no such dtype.
    """
    if dtype not in DTYPES:
        raise PretrainedError(f"dtype must be one of {', '.join(DTYPES)}, got {dtype!r}")
    architecture, scaling = ARCHITECTURES[name], config.rope_scaling
    tree = {
        "architectures": [architecture.class_name],
        "model_type": name,
        "hidden_act": architecture.hidden_acts[config.activation],
        "vocab_size": config.vocab_size,
        "max_position_embeddings": config.context,
        "hidden_size": config.d_model,
        "num_hidden_layers": config.layers,
        "num_attention_heads": config.heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "attention_bias": config.attention_bias,
        "mlp_bias": config.mlp_bias,
        "intermediate_size": config.d_ff,
        "tie_word_embeddings": config.tie_embeddings,
        "rope_theta": config.rope_theta,
        "rope_scaling": None if scaling is None else rope.to_dict(scaling),
        architecture.eps_key: config.norm_eps,
        "initializer_range": config.init_scale,
        "torch_dtype": dtype,
        "bos_token_id": None,
        "eos_token_id": eot_id,
    }
    tree = {key: value for key, value in tree.items() if key not in architecture.always}
    if config.activation == "fatrelu":
        tree["hidden_act_param"] = config.activation_threshold
    if architecture.windowed:
        tree["sliding_window"] = config.sliding_window
    if architecture.partial_rotary:
        tree["partial_rotary_factor"] = config.rotary_fraction
    if architecture.scaled:
        tree |= _scales(config)
    return tree if live is None else tree | {LIVE: live}


def _scales(config: ModelConfig) -> dict[str, float]:
    """MiniCPM's, such that they are read as ours; by 15 digits 1.4 is not written as 1.39999..."""
    scales = {
        "scale_emb": config.embed_scale,
        "scale_depth": config.residual_scale * math.sqrt(config.layers),
        "dim_model_base": config.logit_scale * config.d_model,
    }
    return {key: float(f"{scale:.15g}") for key, scale in scales.items()}


def of_source(source: Path, context: int) -> dict[str, Any]:
    """What config.json keeps of that of the model from which this one was made.

    `max_position_embeddings` is the source's, unless this model's context is longer. Ids of special
    tokens are kept with the tokenizer that has them.

    Raises:
      PretrainedError: the source's config.json cannot be read.
    """
    path = source / "config.json"
    if not path.exists():
        return {}
    model, _ = read(source, "float32", "float32")
    tree = read_json(path)
    special = _SPECIAL if tokenizer_file.is_in(source) else ()
    kept = {key: tree[key] for key in special if tree.get(key) is not None}
    return kept | {"max_position_embeddings": max(model.context, context)}


def write(directory: Path, tree: dict[str, Any], source: Path | None, eot_id: int) -> None:
    """Writes config.json; generation_config.json is that of `source`, or has its special tokens."""
    (directory / "config.json").write_text(json.dumps(tree, indent=2) + "\n")
    name = "generation_config.json"
    if source is not None and (source / name).exists():
        companions.copy(source, name, directory)
        return
    ends = {key: tree[key] for key in ("bos_token_id", "eos_token_id")}
    ends["pad_token_id"] = eot_id
    (directory / name).write_text(json.dumps(ends, indent=2) + "\n")

"""Converts config.json of Hugging Face models to `ModelConfig`."""

import logging
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from twell_jax import untrusted
from twell_jax.config import ModelConfig
from twell_jax.config.model import ActivationName
from twell_jax.models.pretrained import files, keys, quantisation, rope
from twell_jax.models.pretrained.architectures import ARCHITECTURES, SPARSE, Architecture
from twell_jax.models.pretrained.json_file import (
    PretrainedError,
    first,
    positive,
    read_json,
    unsupported,
)
from twell_jax.models.quantised import Part

log = logging.getLogger(__name__)

DTYPES = ("bfloat16", "float32")
# What a model of a dtype that we do not compute in is read as: 16 bits remain 16, which is what the
# kernels take. bfloat16 holds the range of float16, so nothing overflows; its values are rounded.
_READ_AS = {"float16": "bfloat16"}

# A key of ours alone: for each layer the number of live neurons. What we save has weights of zero
# for the others, so that whoever does not know the key computes the same.
LIVE = "live_neurons"


@dataclass(frozen=True)
class Stored:
    """How the files hold the parameters of a `Transformer`, beyond what its configuration says.

    Attributes:
      absent: names of parameters that the files lack and that are zero.
      passed_over: parts of the names of tensors that are not read.
      hybrid: whether a model saved them that multiplied by the publication's hybrid kernel.
      scale_offset: what is added to the scales of norms as they are in the files.
      quantised: the parts that are in 8 bits.
      live: number of live neurons of each layer, if the model has such numbers.
    """

    absent: tuple[str, ...] = ()
    passed_over: tuple[str, ...] = ()
    hybrid: bool = False
    scale_offset: float = 0.0
    quantised: tuple[Part, ...] = ()
    live: tuple[int, ...] | None = None


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
    keys.check(path, tree, architecture)
    kinds = first(tree.get("layer_types"), [])
    for kind in kinds if isinstance(kinds, list) else [kinds]:
        if kind != "full_attention":
            raise unsupported(path, "layer_types", kind, ["full_attention"])
    given = {**architecture.defaults, **tree, **architecture.always}
    if dtype is None:
        dtype = first(tree.get("dtype"), tree.get("torch_dtype"), "float32")
        dtype = _READ_AS.get(str(dtype), dtype)
    if dtype not in DTYPES:
        raise PretrainedError(f"{path}: dtype={dtype!r}; name bfloat16 or float32 to load it as")
    try:
        config = _config(path, architecture, given, dtype, param_dtype or dtype)
    except KeyError as error:
        raise PretrainedError(f"{path}: has no {error.args[0]}") from None
    except ValidationError as error:
        problem = error.errors()[0]
        key = ".".join(map(str, problem["loc"]))
        raise PretrainedError(f"{path}: {key} {problem['msg']}".replace("  ", " ")) from None
    files.require_layers(directory, config.layers)
    hybrid = name.endswith(SPARSE) and config.gated and tree.get("sparsity_use_hybrid_kernel")
    return config, Stored(
        absent=architecture.absent,
        passed_over=architecture.passed_over,
        hybrid=bool(hybrid),
        scale_offset=architecture.scale_offset,
        quantised=quantisation.read(path, tree, config.layers, config.tie_embeddings),
        live=_live(path, tree, config),
    )


def _live(path: Path, tree: dict[str, Any], config: ModelConfig) -> tuple[int, ...] | None:
    """The number of live neurons of each layer; None if the model has no such numbers."""
    if not config.live_width:
        return None
    numbers, layers, d_ff = tree[LIVE], config.layers, config.d_ff
    is_list = isinstance(numbers, list) and len(numbers) == layers
    if not is_list or not all(type(n) is int and 0 <= n <= d_ff for n in numbers):
        raise PretrainedError(
            f"{path}: {LIVE} must be {layers} integers from 0 to {d_ff}, one for each layer, "
            f"got {untrusted.short(numbers)}"
        )
    return tuple(numbers)


def _config(
    path: Path, architecture: Architecture, given: dict[str, Any], dtype: str, param_dtype: str
) -> ModelConfig:
    theta, scaling, rotary_fraction = rope.read(path, given, architecture.partial_rotary)
    activation, threshold = _activation(path, architecture, given)
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
        activation=activation,
        activation_threshold=threshold,
        gated=given.get("sparsity_gated_mlp", architecture.gated),
        mlp_bias=given["mlp_bias"],
        live_width=given.get(LIVE) is not None,
        tie_embeddings=given["tie_word_embeddings"],
        rope_theta=theta,
        rope_scaling=scaling,
        rotary_fraction=rotary_fraction,
        norm=architecture.norm,
        norm_eps=given[architecture.eps_key],
        init_scale=given["initializer_range"],
        dtype=dtype,
        param_dtype=param_dtype,
        **scales,
    )


def _activation(
    path: Path, architecture: Architecture, given: dict[str, Any]
) -> tuple[ActivationName, float]:
    """The activation and its threshold; a warning says if the weights hardly want it."""
    name, threshold = given["hidden_act"], given.get("hidden_act_param")
    if not isinstance(name, str) or name not in architecture.activations:
        raise unsupported(path, "hidden_act", name, architecture.activations)
    activation = architecture.activations[name]
    if activation == "fatrelu":
        return activation, positive(path, "hidden_act_param", threshold)
    if activation == "relu" and (threshold or architecture.has_threshold):
        log.warning(
            "%s: hidden_act='relu', but the weights were trained for a FATReLU; write "
            "hidden_act='fatrelu' and hidden_act_param=%s",
            path,
            threshold or "its threshold",
        )
    return activation, 0.0


def _scales(path: Path, given: dict[str, Any]) -> dict[str, float]:
    """MiniCPM's: its files name the depth and the width of the model that it was tuned on."""
    names = ("scale_emb", "scale_depth", "dim_model_base", "num_hidden_layers", "hidden_size")
    embed, depth, base_width, layers, width = (positive(path, key, given[key]) for key in names)
    return {
        "embed_scale": embed,
        "residual_scale": depth / math.sqrt(layers),
        "logit_scale": base_width / width,
    }


def ends(directory: Path) -> tuple[Path, tuple[int, ...]]:
    """The ids of the tokens that end a text, and the file that names them; no ids if none does.

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
        return path, tuple(ids)
    return directory / "config.json", ()

"""What a run takes from `init_from`: a run, or a model in Hugging Face's format, also of the hub.

A model in Hugging Face's format also decides the `model` section and the tokenizer, so that a
configuration need not have them. A run does so where `model` lacks keys that it must have, and else
gives its parameters alone. A run that has a checkpoint takes nothing any more: its source may have
changed or gone.
"""

import os
from pathlib import Path
from typing import Any

import jax
from flax import nnx

from twell_jax.config import Config, ConfigError, ModelConfig
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.models.pretrained import PretrainedError, hub, weights
from twell_jax.models.pretrained import config as pretrained_config
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer
from twell_jax.train.run_directory import (
    RunPaths,
    differences,
    has_started,
    last_params,
    load_config,
)

# Settings of the model that may differ from those of the source.
_MAY_DIFFER = {
    "model.activation", "model.activation_threshold", "model.context", "model.dtype",
    "model.rope_theta", "model.norm_eps", "model.init_scale",
}  # fmt: skip

# Keys of `model` that say how a run computes; its source does not decide them.
_NOT_TAKEN = {
    "remat", "matmul_dtype", "ffn_implementation", "decode_implementation", "kv_cache_dtype",
    "ffn_gradients",
}  # fmt: skip
_DTYPES = {"dtype", "param_dtype"}  # nor do a model's files decide these

_REQUIRED = {name for name, field in ModelConfig.model_fields.items() if field.is_required()}


def is_run(name: str) -> bool:
    """Whether `init_from` names the directory of a run, rather than a model in another format."""
    return os.path.exists(RunPaths(name).config) and not os.path.exists(f"{name}/config.json")


def filled(tree: dict[str, Any], *, training: bool) -> dict[str, Any]:
    """Completes a configuration by the model that its `init_from` names.

    Keys of `model` that are missing or null get the values of that model, and `data.tokenizer`, if
    missing, becomes the name in `init_from`, which stands for that model's tokenizer. If `run_dir`
    holds a started run with this `init_from`, the values are those that it was started with.
    A run does this only for a `model` that lacks required keys.

    Args:
      tree: the values of a configuration, not checked yet.
      training: whether the run is about to start. Otherwise a name that is no directory is looked
        up on the hub only if `model` lacks required keys.

    Returns:
      The completed tree; the given one if `init_from` is null.

    Raises:
      ConfigError: there is no such model, or the configuration contradicts it; the message, one
        line, names the key.
    """
    name, model, data = (tree.get(key) for key in ("init_from", "model", "data"))
    model, data = ({} if section is None else section for section in (model, data))
    if not (isinstance(name, str) and isinstance(model, dict) and isinstance(data, dict)):
        return tree  # null, or what a check of the tree will name
    name, lacks = os.path.expanduser(name), _REQUIRED - model.keys()
    if not lacks and (is_run(name) or not (training or os.path.exists(name))):
        return tree
    if before := _started_from(name, tree.get("run_dir")):
        given, tokenizer = _of_run(before), before.data.tokenizer
    elif is_run(name):
        source = load_config(name)
        given = _of_run(source)
        tokenizer = "byte" if source.data.tokenizer == "byte" else name
    else:
        given, has_tokenizer = _of_model(name)
        _require_agreement(model, data, given, has_tokenizer, name)
        tokenizer = name
    own = {key: value for key, value in model.items() if value is not None or key not in given}
    if data.get("tokenizer") is None:
        data = data | {"tokenizer": tokenizer}
    return tree | {"model": given | own, "data": data}


def tokenizer_of(config: Config) -> Tokenizer | None:
    """The tokenizer that comes with `init_from`; None if `data.tokenizer` names another one.

    Raises:
      ConfigError: it cannot be read.
    """
    if config.init_from is None or config.data.tokenizer != config.init_from:
        return None
    paths = RunPaths(config.run_dir)
    if has_started(paths):
        return tokenizers.load(paths.tokenizer)
    if is_run(config.init_from):
        return tokenizers.load(RunPaths(config.init_from).tokenizer)
    try:
        return pretrained_tokenizer.load(hub.find(config.init_from).directory)
    except PretrainedError as error:
        raise ConfigError(f"init_from: {error}") from None


def initial_params(
    config: Config, tokenizer: Tokenizer, abstract_params: nnx.State, mesh: jax.sharding.Mesh
) -> nnx.State:
    """The parameters in `config.init_from`: those of a model, or the last ones of a run.

    The settings of both models must agree, apart from some that do not decide their parameters,
    such as the activation of the feed-forward blocks.

    Args:
      config: of the new run.
      tokenizer: of the new run.
      abstract_params: shapes, dtypes (`model.param_dtype`) and shardings of its parameters.
      mesh: its devices.

    Raises:
      ConfigError: there is no such source, it has no parameters, or its model or tokenizer differs.
      CheckpointError: no checkpoint of the source is whole.
    """
    name = config.init_from
    assert name is not None
    if is_run(name):
        return _params_of_run(name, config, tokenizer, abstract_params)
    try:
        source = hub.find(name)
        _, stored = pretrained_config.read(source.directory, None, None)
        if stored.quantised:
            raise PretrainedError(f"{name}: has weights in 8 bits, which cannot be trained")
        hub.fetch_weights(source)
        return weights.load(source.directory, config.model, mesh, stored)
    except PretrainedError as error:
        raise ConfigError(f"init_from: {error}") from None


def source_model(config: Config) -> ModelConfig:
    """`config.model` with the activation that the source was trained with, and what else of it may
    differ and changes what is computed.

    Raises:
      ConfigError: there is no such source.
    """
    assert config.init_from is not None
    source = settings_of(config.init_from)
    computed = ("activation", "activation_threshold", "rope_theta", "norm_eps")
    update = {key: getattr(source, key) for key in computed}
    if source.activation == "silu":  # which no kernel serves
        update |= {"ffn_implementation": None, "ffn_gradients": None}
    return config.model.model_copy(update=update)


def settings_of(name: str) -> ModelConfig:
    """The settings of a model that can be trained on: of a run, a directory or a name on the hub.

    Raises:
      ConfigError: there is none.
    """
    if is_run(name):
        return load_config(name).model
    return _read(name)[0]


def _started_from(name: str, run_dir: Any) -> Config | None:
    """The settings of the run in `run_dir`, if it has a checkpoint and began with `name`."""
    if not isinstance(run_dir, str) or not has_started(RunPaths(run_dir)):
        return None
    before = load_config(run_dir)
    return before if before.init_from == name else None


def _of_model(name: str) -> tuple[dict[str, Any], bool]:
    """The keys of `model` that the model decides, and whether it has a tokenizer."""
    settings, directory = _read(name)
    return _decided(settings), (directory / "tokenizer.json").exists()


def _of_run(run: Config) -> dict[str, Any]:
    """The keys of `model` that a run decides."""
    return run.model.model_dump(exclude=_NOT_TAKEN)


def _read(name: str) -> tuple[ModelConfig, Path]:
    """The settings of a model in Hugging Face's format, and where its small files are."""
    try:
        directory = hub.find(name).directory
        if not (directory / "config.json").exists():
            raise PretrainedError(f"{name}: is not the directory of a run and holds no config.json")
        return pretrained_config.read(directory, None, None)[0], directory
    except PretrainedError as error:
        raise ConfigError(f"init_from: {error}") from None


def _decided(model: ModelConfig) -> dict[str, Any]:
    """The keys of `model` that a model's files decide, without nulls that stand for a default."""
    taken = model.model_dump(exclude=_NOT_TAKEN | _DTYPES)
    return taken | {"kv_heads": model.num_kv_heads, "head_size": model.head_dim}


def _require_agreement(
    model: dict[str, Any],
    data: dict[str, Any],
    given: dict[str, Any],
    has_tokenizer: bool,
    name: str,
) -> None:
    for key, old in given.items():
        new = model.get(key)
        if new is not None and new != old and f"model.{key}" not in _MAY_DIFFER:
            raise ConfigError(
                f"model.{key}: {new!r}, but init_from={name} has {old!r}; leave it out, as it "
                "follows from init_from"
            )
    tokenizer = data.get("tokenizer")
    if has_tokenizer and tokenizer is not None and tokenizer != name:
        raise ConfigError(
            f"data.tokenizer: {tokenizer!r}, but init_from={name} has its own tokenizer; leave it "
            "out"
        )
    if not has_tokenizer and tokenizer is None:
        raise ConfigError(
            f"data.tokenizer: init_from={name} has no tokenizer.json; name the tokenizer that the "
            "model was trained with"
        )


def _params_of_run(
    name: str, config: Config, tokenizer: Tokenizer, abstract_params: nnx.State
) -> nnx.State:
    source = load_config(name)
    for key, old, new in differences(
        source.model.model_dump(), config.model.model_dump(), "model."
    ):
        if key not in _MAY_DIFFER:
            raise ConfigError(f"{key}: {new!r}, but init_from={name} has {old!r}")
    if tokenizers.load(RunPaths(name).tokenizer).to_json() != tokenizer.to_json():
        raise ConfigError(f"data.tokenizer: not that of init_from={name}")
    return last_params(name, source, abstract_params)

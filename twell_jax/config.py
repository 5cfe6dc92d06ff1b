"""Training configuration: typed sections, one YAML file, dotted overrides.

`load("configs/tiny.yaml", ["steps=10", "model.d_model=64"])` returns a frozen `Config`. Every key
is declared here, once, with its meaning; whatever is unknown, mistyped or impossible raises a
`ConfigError` whose single line names the key and what is allowed.
"""

import difflib
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    ValidationError,
    field_validator,
    model_validator,
)
from pydantic_core import PydanticCustomError


class ConfigError(ValueError):
    """A configuration that cannot be run; the message names the key and what is allowed."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    @field_validator("*", mode="before")
    @classmethod
    def _no_bool_as_number(cls, value, info):
        # pydantic takes true for 1
        if isinstance(value, bool) and cls.model_fields[info.field_name].annotation is not bool:
            raise PydanticCustomError("bool_as_number", "must not be true or false")
        return value


class ModelConfig(_Section):
    """A Llama-style decoder: RMSNorm, RoPE, causal attention, (gated) feed-forward blocks."""

    vocab_size: int = Field(gt=0, description="rows of the embedding; the tokenizer must fit in")
    context: int = Field(gt=1, description="tokens per training sequence")
    d_model: int = Field(gt=0, description="width of the residual stream")
    layers: int = Field(gt=0, description="number of transformer blocks")
    heads: int = Field(gt=0, description="query heads")
    kv_heads: int | None = Field(None, gt=0, description="key/value heads (default: heads)")
    head_size: int | None = Field(
        None, gt=0, description="features of a head (default: d_model is divided among them)"
    )
    attention_bias: bool = Field(False, description="add biases to the attention's projections")
    d_ff: int = Field(gt=0, description="hidden units (neurons) of a feed-forward block")
    activation: Literal["relu", "silu"] = Field("relu", description="silu gives the dense twin")
    gated: bool = Field(True, description="h = act(x Wg) * (x Wu), else h = act(x Wu)")
    tie_embeddings: bool = Field(True, description="use the embedding as the output projection")
    rope_theta: float = Field(1e5, gt=0, description="base of the rotary frequencies")
    norm_eps: float = Field(1e-5, gt=0, description="epsilon of the RMS norms")
    init_scale: float = Field(0.02, gt=0, description="standard deviation of the initial weights")
    dtype: Literal["bfloat16", "float32"] = Field("bfloat16", description="dtype of the compute")
    param_dtype: Literal["bfloat16", "float32"] = Field("float32", description="master weights")
    remat: Literal["none", "dots", "block"] = Field(
        "none", description="recompute in the backward pass: nothing, all but matmuls, whole blocks"
    )
    ffn_implementation: Literal["xla", "mosaic"] | None = Field(
        None, description="of the feed-forward block; null takes the default of sparse_ffn"
    )
    ffn_gradient_capacity: float = Field(
        0.5, gt=0, le=1, description="memory for sparse gradients, as a fraction of that of dense"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.head_size is not None and self.head_size % 2:
            raise ValueError(f"model.head_size: must be even, got {self.head_size}")
        if self.head_size is None and self.d_model % (2 * self.heads):
            raise ValueError(
                f"model.heads: d_model={self.d_model} must split into heads of an even size, "
                f"got heads={self.heads}"
            )
        if self.heads % self.num_kv_heads:
            raise ValueError(
                f"model.kv_heads: must divide heads={self.heads}, got {self.num_kv_heads}"
            )
        return self

    @property
    def head_dim(self) -> int:
        return self.head_size or self.d_model // self.heads

    @property
    def num_kv_heads(self) -> int:
        return self.kv_heads or self.heads


_ONLY_FOR = {
    "paths": ("files", "tokens"),
    "held_out_paths": ("tokens",),
    "name": ("hf",),
    "subset": ("hf",),
}


class DataConfig(_Section):
    """Where the text comes from and how it becomes token sequences."""

    source: Literal["stdlib", "files", "hf", "tokens"] = Field(
        "stdlib",
        description="the running Python's standard library; text or JSONL files; a Hugging Face "
        "dataset (streamed); token shards (.npy of uint16/uint32)",
    )
    paths: tuple[str, ...] = Field((), description="files or globs (source files and tokens)")
    held_out_paths: tuple[str, ...] = Field(
        (), description="held-out token shards (source tokens); without: the tail of `paths`"
    )
    name: str | None = Field(None, description="dataset name or local directory (source hf)")
    subset: str | None = Field(None, description="configuration of the dataset (source hf)")
    split: str = Field("train", description="split of the dataset (source hf)")
    text_field: str = Field("text", description="field that holds the text (JSONL, hf)")
    tokenizer: str = Field(
        "byte", description="byte, bpe (trained on the corpus), or a Hugging Face name or path"
    )
    held_out_fraction: float = Field(
        0.05, gt=0, lt=1, description="share of the documents (files) kept for evaluation"
    )
    mask_documents: bool = Field(
        False, description="no attention across documents of a packed sequence"
    )
    cache_dir: str = Field(".cache/tokens", description="where tokenised corpora are kept")

    @model_validator(mode="after")
    def _check(self):
        for name, sources in _ONLY_FOR.items():
            if getattr(self, name) and self.source not in sources:
                raise ValueError(f"data.{name}: source={self.source} does not use it; leave it out")
        if self.source in ("files", "tokens") and not self.paths:
            raise ValueError(f"data.paths: source={self.source} needs at least one path or glob")
        if self.source == "hf" and not self.name:
            raise ValueError("data.name: source=hf needs the name of a dataset or its directory")
        if self.source == "tokens" and self.tokenizer == "bpe":
            raise ValueError(
                "data.tokenizer: source=tokens has no text to train a bpe on; name the tokenizer "
                "that made the shards (byte, or a Hugging Face name or path)"
            )
        return self


class OptimizerConfig(_Section):
    """AdamW with warm-up, a decaying learning rate and clipping by the global norm."""

    lr: float = Field(1e-3, gt=0, description="peak learning rate")
    warmup_steps: int = Field(0, ge=0, description="steps of linear warm-up from zero")
    schedule: Literal["cosine", "wsd"] = Field(
        "cosine", description="decay: cosine, or warm-up, stable, decay (linear at the end)"
    )
    decay_fraction: float = Field(0.2, gt=0, le=1, description="share of the steps wsd decays over")
    final_lr_fraction: float = Field(0.1, ge=0, le=1, description="last over peak learning rate")
    b1: float = Field(0.9, ge=0, lt=1, description="decay of the first moment")
    b2: float = Field(0.95, ge=0, lt=1, description="decay of the second moment")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(0.1, ge=0, description="decoupled; not applied to norms")
    clip_norm: float = Field(1.0, gt=0, description="largest global norm of the gradient")


class MeshConfig(_Section):
    """Devices are laid out as (data, fsdp); data = -1 takes all that fsdp leaves."""

    data: int = Field(-1, ge=-1, description="copies of the model that see different data")
    fsdp: int = Field(1, gt=0, description="devices that share one copy's state")
    heartbeat_seconds: int = Field(
        100, gt=0, description="a process that is silent for so long is lost, and ends the others"
    )

    @model_validator(mode="after")
    def _check(self):
        if self.data == 0:
            raise ValueError("mesh.data: must be positive, or -1 for all remaining devices")
        return self

    def shape(self, devices: int) -> tuple[int, int]:
        """(data, fsdp) on so many devices.

        Raises:
          ConfigError: if data * fsdp is not their number, or there are none.
        """
        if devices < 1:
            raise ConfigError(f"devices: there must be at least one, got {devices}")
        if devices % self.fsdp:
            raise ConfigError(f"mesh.fsdp: {self.fsdp} does not divide {devices} devices")
        data = devices // self.fsdp if self.data == -1 else self.data
        if data * self.fsdp != devices:
            raise ConfigError(
                f"mesh.data: {self.data} x fsdp={self.fsdp} must use all {devices} devices"
            )
        return data, self.fsdp


class Config(_Section):
    """A training run."""

    run_dir: str = Field(description="checkpoints, metrics and plots go here")
    init_from: str | None = Field(
        None, description="run whose last parameters are the initial ones; null: drawn from seed"
    )
    seed: int = Field(
        0, ge=0, lt=2**32, description="of the initial weights and the order of the data"
    )
    steps: int = Field(gt=0, description="optimizer steps")
    batch_tokens: int = Field(gt=0, description="tokens per optimizer step, over all devices")
    micro_batch: int = Field(gt=0, description="sequences per device in one forward pass")
    l1_coefficient: float = Field(
        0.0, ge=0, description="times the mean over tokens and layers of sum_n |h_n|"
    )
    l1_warmup: tuple[int, int] = Field(
        (0, 0), description="steps between which the L1 coefficient rises linearly from zero"
    )
    l1_stages: int = Field(
        0, ge=0, description="it rises in so many equal stages instead; 0: linearly"
    )
    dead_window_tokens: int = Field(
        10_000_000, gt=0, description="a neuron that has not fired for so many tokens is dead"
    )
    reinit_every: int = Field(
        0, ge=0, description="steps between re-initialisations of dead neurons' gates; 0: never"
    )
    sparse_gradients_every: int = Field(
        0,
        ge=0,
        description="steps between choices of the layers whose gradients are computed sparsely, "
        "on Hopper GPUs, others being dense; 0: all as model.ffn_implementation says",
    )
    eval_every: int = Field(500, gt=0, description="steps between held-out evaluations")
    eval_sequences: int = Field(64, gt=0, description="held-out sequences per evaluation")
    checkpoint_every: int = Field(500, gt=0, description="steps between checkpoints")
    checkpoint_keep: int = Field(3, gt=0, description="newest checkpoints kept")
    log_every: int = Field(10, gt=0, description="steps between lines of metrics.jsonl")
    tensorboard: bool = Field(False, description="also write TensorBoard events (extra)")
    model: ModelConfig
    data: DataConfig = DataConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    mesh: MeshConfig = MeshConfig()

    @model_validator(mode="after")
    def _check(self):
        if self.batch_tokens % self.model.context:
            raise ValueError(
                f"batch_tokens: must be a multiple of model.context={self.model.context}, "
                f"got {self.batch_tokens}"
            )
        if self.model.d_model % self.mesh.fsdp:
            raise ValueError(
                f"mesh.fsdp: must divide model.d_model={self.model.d_model}, got {self.mesh.fsdp}"
            )
        if self.sparse_gradients_every and self.model.ffn_implementation == "mosaic":
            raise ValueError(
                "sparse_gradients_every: chooses between dense and sparse gradients, so "
                "model.ffn_implementation must be xla or null, got mosaic"
            )
        start, end = self.l1_warmup
        if not 0 <= start <= end:
            raise ValueError(f"l1_warmup: needs 0 <= start <= end, got [{start}, {end}]")
        if self.l1_stages > end - start:
            raise ValueError(
                f"l1_stages: {self.l1_stages} stages do not fit into the {end - start} steps of "
                "l1_warmup"
            )
        return self

    @property
    def batch_sequences(self) -> int:
        """Sequences per optimizer step, over all devices."""
        return self.batch_tokens // self.model.context

    def accumulation_steps(self, devices: int) -> int:
        """Micro-batches per optimizer step on so many devices.

        Raises:
          ConfigError: if micro_batch * devices does not divide the global batch.
        """
        steps, rest = divmod(self.batch_sequences, self.micro_batch * devices)
        if rest or not steps:
            raise ConfigError(
                f"micro_batch: {self.micro_batch} sequences on each of {devices} devices must "
                f"divide batch_tokens / model.context = {self.batch_sequences}"
            )
        return steps


def load(path: str | Path, overrides: list[str] = ()) -> Config:
    """Reads a YAML file and applies `key.subkey=value` overrides (values are YAML too).

    A file may name another, beside it, as its `base` and give only what differs.

    Raises:
      ConfigError: one line that names the file or key and what would be right.
    """
    tree = _read(Path(path))
    for override in overrides:
        _override(tree, override)
    return from_dict(tree)


def from_dict(tree: dict[str, Any]) -> Config:
    """Checks a plain tree of values; raises `ConfigError` as `load` does."""
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # A misspelt key is also a missing one: what is unknown says more.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError(_one_line(first)) from None


def to_yaml(config: Config) -> str:
    """The resolved configuration, every default included, as YAML that `load` reads."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def describe() -> str:
    """Every key with its type, default and meaning, a line each (for `--help`)."""
    return "\n".join(_describe(Config, prefix=""))


def _read(path: Path, above: tuple[Path, ...] = ()) -> dict[str, Any]:
    try:
        tree = yaml.safe_load(path.read_text())
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path}: not valid YAML ({' '.join(str(error).split())})") from None
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold keys and values, such as 'steps: 100'")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str) or path.parent / base in (path, *above):
        raise ConfigError(f"base: {path} must name another file beside it, got {base!r}")
    return _merge(_read(path.parent / base, (path, *above)), tree)


def _merge(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tree.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if nested else value
    return merged


def _override(tree: dict[str, Any], override: str) -> None:
    key, equals, value = override.partition("=")
    if not (key and equals):
        raise ConfigError(f"{override!r}: an override is written key=value, such as steps=100")
    *parents, leaf = key.split(".")
    for parent in parents:
        tree = tree.setdefault(parent, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"{key}: {parent} is a single value and has no keys of its own")
    try:
        tree[leaf] = yaml.safe_load(value)
    except yaml.YAMLError:
        raise ConfigError(f"{key}: {value!r} is not a valid YAML value") from None


def _one_line(error: dict[str, Any]) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section = _section(error["loc"][:-1])
        allowed = list(section.model_fields) if section else []
        close = difflib.get_close_matches(error["loc"][-1], allowed, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{key}: required, but not given"
    if error["type"] == "value_error":  # raised by a _check above, which names the key itself
        return str(error["ctx"]["error"])
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _section(path: tuple) -> type[_Section] | None:
    section = Config
    for name in path:
        section = section.model_fields[name].annotation
    return section


def _describe(section: type[_Section], prefix: str) -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, _Section):
            lines += _describe(field.annotation, prefix=f"{prefix}{name}.")
            continue
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        if not isinstance(field.annotation, type):
            kind = str(field.annotation).replace("typing.", "")
        default = "" if field.is_required() else f" = {field.default}"
        lines.append(f"  {prefix}{name}: {kind}{default}\n      {field.description or ''}".rstrip())
    return lines

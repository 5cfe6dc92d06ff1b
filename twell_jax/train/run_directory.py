"""The directory of a run: its resolved configuration, tokenizer, checkpoints, metrics and plots."""

import contextlib
import fcntl
import os
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import jax
from flax import nnx

from twell_jax import config as config_lib
from twell_jax.config import Config, ConfigError
from twell_jax.data import tokenizers
from twell_jax.data.tokenizers import Tokenizer
from twell_jax.models import sharding
from twell_jax.models.transformer import Transformer, graphdef
from twell_jax.train.checkpoint_errors import CannotSave
from twell_jax.train.durable import TEMPORARY, write_atomically
from twell_jax.train.state import abstract_state

if TYPE_CHECKING:
    from twell_jax.train.checkpoint import Checkpoints

# Settings that may change when a run continues; all others affect its result.
_MAY_CHANGE = {
    "run_dir", "steps", "micro_batch", "mesh", "eval_every", "eval_sequences", "checkpoint_every",
    "sample_tokens", "checkpoint_keep", "log_every", "profile_steps", "tensorboard", "wandb",
    "data.cache_dir", "data.strict",
    "model.remat", "model.ffn_implementation", "model.ffn_gradients", "sparse_gradients_every",
    "model.decode_implementation", "model.kv_cache_dtype",
}  # fmt: skip

# In a path, Orbax and TensorStore take them for a pattern or a slash: checkpoints would be written,
# but could never be restored.
_NOT_IN_PATHS = "*?[\\"


class AnotherRun(ConfigError):
    """The run in `run_dir` was started with other settings or other text."""


class RunPaths:
    """The paths of the files in a run directory."""

    def __init__(self, directory: str | Path) -> None:
        self.directory = Path(os.path.expanduser(directory))
        self.config = self.directory / "config.yaml"
        self.id = self.directory / "id"
        self.tokenizer = self.directory / "tokenizer.json"
        self.checkpoints = self.directory / "checkpoints"
        self.metrics = self.directory / "metrics.jsonl"
        self.profile = self.directory / "profile"
        self.report = self.directory / "report.md"
        self.analysis = self.directory / "analysis.json"
        self.source = self.directory / "source"


@contextlib.contextmanager
def lock_run(run_dir: str | Path) -> Iterator[Callable[[], None]]:
    """Locks a run against other processes of this machine; creates its directory if missing.

    The lock is on the directory itself, whichever path leads to it, and leaves no file. It ends
    with the process.

    Yields:
      A function that raises `CannotSave` if the path leads elsewhere by now, as the directory was
      moved: another process may have locked what is there. Call it before anything is written.

    Raises:
      ConfigError: another process holds the lock, or this is no directory and cannot become one, or
        its path has a character with which no checkpoint could be restored.
    """
    path = str(Path(run_dir).absolute())
    if wrong := [character for character in _NOT_IN_PATHS if character in path]:
        raise ConfigError(
            f"run_dir: {path} has {' and '.join(wrong)}, with which no checkpoint could be "
            "restored; choose another run_dir, or a link that leads there"
        )
    directory = Path(os.path.realpath(run_dir))  # to create it where a dangling link points
    try:
        if not directory.exists():
            directory.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    except OSError as error:
        raise _cannot("created or opened", run_dir, error) from None
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        os.close(descriptor)
        if isinstance(error, BlockingIOError):
            raise ConfigError(f"run_dir: another process is training in {run_dir}") from None
        raise _cannot("locked", run_dir, error) from None

    def require_in_place() -> None:
        try:
            in_place = os.path.samestat(os.fstat(descriptor), os.stat(run_dir))
        except OSError:
            in_place = False
        if not in_place:
            raise CannotSave(
                f"run_dir: {run_dir} is no longer the directory in which this run began; nothing "
                "is saved in its place. Move it back, and the same command continues from its last "
                "checkpoint"
            )

    try:
        yield require_in_place
    finally:
        os.close(descriptor)


def open_run(config: Config) -> RunPaths:
    """Creates the run's directory, or opens it to continue the run that it holds.

    A run that has no checkpoint yet starts anew, with any settings and another id. One that has
    keeps the settings that it had, until `keep_settings`: what comes next may refuse the new ones.

    Raises:
      ConfigError: the directory holds something other than a run, or cannot be written.
      AnotherRun: the directory holds a run whose settings differ such that the result would change;
        the message names the first such key.
    """
    paths = RunPaths(config.run_dir)
    if paths.directory.exists() and not _is_empty(paths.directory):
        before = load_config(paths.directory)
        now = config.model_dump() if has_started(paths) else {}
        for key, old, new in differences(before.model_dump(), now):
            raise AnotherRun(
                f"{key}: the run in {paths.directory} was started with {old!r}, now {new!r}; "
                "choose another run_dir, or the old value to continue it"
            )
    if jax.process_index() == 0:
        try:
            paths.directory.mkdir(parents=True, exist_ok=True)
            if not has_started(paths):
                keep_settings(paths, config)
                write_atomically(paths.id, f"{uuid.uuid4().hex}\n")
        except OSError as error:
            raise _cannot("written", paths.directory, error) from None
    return paths


def keep_settings(paths: RunPaths, config: Config) -> None:
    """Writes the settings with which a run begins or goes on."""
    write_atomically(paths.config, config_lib.to_yaml(config))


def has_started(paths: RunPaths) -> bool:
    """Whether the run has a checkpoint, so that it is continued rather than begun."""
    return paths.checkpoints.exists() and any(paths.checkpoints.iterdir())


def open_checkpoints(paths: RunPaths, config: Config) -> "Checkpoints":
    """The checkpoints of a run, which restore those of no other run.

    An older version gave its runs no id: they restore what is there, and save without an id.
    """
    # It takes 0.2 s to import, for Orbax, which models in Hugging Face's format do not need.
    from twell_jax.train.checkpoint import Checkpoints

    has_id = paths.id.exists()
    run = paths.id.read_text(encoding="utf-8", errors="replace").strip() if has_id else None
    return Checkpoints(paths.checkpoints, config.checkpoint_keep, run)


def started_with(run_dir: str | Path) -> Config | None:
    """The configuration with which a run was last started; None if it has no checkpoint yet.

    Raises:
      ConfigError: see `load_config`.
    """
    return load_config(run_dir) if has_started(RunPaths(run_dir)) else None


def load_config(run_dir: str | Path) -> Config:
    """The resolved configuration with which a run was last started.

    Raises:
      ConfigError: there is no run.
    """
    try:
        return config_lib.from_dict(in_todays_terms(config_lib.read(RunPaths(run_dir).config)))
    except ConfigError as error:
        raise ConfigError(f"run_dir: {run_dir} is not the directory of a run ({error})") from None


def load_run(
    run_dir: str, meanwhile: Callable[[Tokenizer, Transformer], None] | None = None
) -> tuple[Config, Tokenizer, Transformer]:
    """The configuration, tokenizer and model of a run's last checkpoint, on the first device.

    The model is for inference, so it asks neither for sparse gradients nor for products in 8 bits.

    Args:
      run_dir: the run's.
      meanwhile: is called before parameters are read, with `jax.ShapeDtypeStruct`s in their place.

    Raises:
      ConfigError: there is no run in `run_dir`, or it has no checkpoint yet.
      CheckpointError: no checkpoint is whole.
    """
    config = load_config(run_dir)
    mesh = sharding.make_mesh((1, 1), jax.devices()[:1])
    abstract = abstract_state(config, mesh).params
    tokenizer = tokenizers.load(RunPaths(run_dir).tokenizer)
    of_inference = {"ffn_gradients": None, "matmul_dtype": None}
    graph = graphdef(config.model.model_copy(update=of_inference))
    if meanwhile is not None:
        meanwhile(tokenizer, nnx.merge(graph, abstract))
    return config, tokenizer, nnx.merge(graph, last_params(run_dir, config, abstract))


def last_params(run_dir: str, config: Config, abstract_params: nnx.State) -> nnx.State:
    """The parameters of a run's last checkpoint, on the devices that `abstract_params` says.

    Raises:
      ConfigError: the run has no checkpoint yet.
      CheckpointError: no checkpoint is whole.
    """
    with open_checkpoints(RunPaths(run_dir), config) as checkpoints:
        params = checkpoints.restore_params(abstract_params)
    if params is None:
        raise ConfigError(f"{run_dir}: the run has no checkpoint yet")
    return params


def in_todays_terms(tree: dict[str, Any]) -> dict[str, Any]:
    """The values of a run's configuration, also of one of an earlier version, as keys of today."""
    model = tree.get("model")
    if not isinstance(model, dict):
        return tree
    # Up to version 0.2 one capacity was set for the sparse gradients of all layers.
    model = {key: value for key, value in model.items() if key != "ffn_gradient_capacity"}
    # Version 0.1 had no ffn_gradients, and could plan gradients for layers with "xla".
    plans_with_xla = (
        "ffn_gradients" not in model
        and tree.get("sparse_gradients_every")
        and model.get("ffn_implementation") == "xla"
    )
    return tree | {"model": model | ({"ffn_implementation": None} if plans_with_xla else {})}


def differences(
    before: dict[str, Any], now: dict[str, Any], prefix: str = ""
) -> Iterator[tuple[str, Any, Any]]:
    """Yields (key, old value, new value) for the settings that would change the result."""
    for name, new in now.items():
        key, old = f"{prefix}{name}", before[name]
        if key in _MAY_CHANGE or old == new:
            continue
        if isinstance(new, dict) and isinstance(old, dict):
            yield from differences(old, new, f"{key}.")
        else:
            yield key, old, new


def _cannot(what: str, run_dir: str | Path, error: OSError) -> ConfigError:
    reason = error.strerror or error
    return ConfigError(f"run_dir: {run_dir} cannot be {what} ({reason}); choose another run_dir")


def _is_empty(directory: Path) -> bool:
    """Whether the directory holds nothing but temporary files of a killed process."""
    return directory.is_dir() and all(p.suffix == TEMPORARY for p in directory.iterdir())

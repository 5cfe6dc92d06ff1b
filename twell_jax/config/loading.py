"""Reads a YAML file and overrides from the command line into a checked `Config`, and writes it."""

import difflib
import functools
import logging
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, get_args

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twell_jax import untrusted
from twell_jax.config.data import ONLY_FOR
from twell_jax.config.doubts import doubts
from twell_jax.config.section import ConfigError, Section
from twell_jax.config.sections import Config

_SHIPPED = Path(__file__).parents[1] / "configs"  # in a clone a link to the repository's configs/

_MOST_BYTES = 2**19  # of a file, which takes seconds to read
_MOST_FILES = 20  # of which each is the base of the one before
_NULLS = ("", "~", "null")

log = logging.getLogger(__name__)


def load(
    name: str | Path,
    overrides: Sequence[str] = (),
    complete: Callable[[dict[str, Any]], dict[str, Any]] = lambda tree: tree,
) -> Config:
    """Reads a configuration and applies `key.subkey=value` overrides.

    A file may name another file in its directory as its `base` and give only what differs. Where
    a file or an override names a `data.source`, what was set below it for other sources alone
    (`data.paths` or `data.name`, for example) is dropped.

    Logs a warning for what the configuration can hardly mean; see `doubts`.

    Args:
      name: a YAML file or, where there is no such file, the name of a shipped configuration:
        "tiny", "tiny.yaml" or "configs/tiny.yaml".
      overrides: later ones win. A key may be its last name alone, if no other key has it: "lr" is
        "optimizer.lr". A value is text as it is where the key holds text, or several texts of which
        this is the only one, and YAML where it holds anything else; nothing, "~" and "null" mean
        null.
      complete: called with the tree of values, not checked yet; returns the one to check.

    Raises:
      ConfigError: the message, one line, names the file or key and what is allowed.
    """
    tree = read(_find(Path(os.path.expanduser(name))))
    parsed = [_parse(override) for override in overrides]
    for keys, value in parsed:
        if keys == ["data", "source"]:
            _drop_for_other_sources(tree, value)
    for keys, value in parsed:
        _set(tree, keys, value)
    config = from_dict(complete(tree))
    for doubt in doubts(config):
        log.warning("%s", doubt)
    return config


def parse(overrides: Sequence[str]) -> dict[str, Any]:
    """The values of overrides by their whole keys, as `load` reads them; nothing is checked yet.

    Raises:
      ConfigError: one is not written key=value, or its value is not YAML.
    """
    return {".".join(keys): value for keys, value in map(_parse, overrides)}


def read(path: Path) -> dict[str, Any]:
    """Reads a YAML file into a tree of values, over those of its `base`; nothing is checked yet.

    Raises:
      ConfigError: a file cannot be read, or does not hold keys and values.
    """
    return _read(path, above=())


def from_dict(tree: dict[str, Any]) -> Config:
    """Checks a tree of values.

    Raises:
      ConfigError: the message, one line, names the key and what is allowed.
    """
    try:
        return Config.model_validate(tree)
    except ValidationError as error:
        # A misspelt key may be missing, too; "unknown key" says more.
        first = min(error.errors(), key=lambda e: e["type"] != "extra_forbidden")
        raise ConfigError(_one_line(first)) from None


def to_yaml(config: Config) -> str:
    """The resolved configuration, every default included, as YAML that `load` reads."""
    return yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)


def describe() -> str:
    """Every key with its type, default and meaning, for `--help`."""
    return "\n".join(_describe(Config, prefix=""))


def shipped() -> dict[str, Path]:
    """The files of the shipped configurations, by their names."""
    return {file.stem: file for file in sorted(_SHIPPED.glob("*.yaml"))}


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    for name, file in shipped().items():
        if path in (Path(name), Path(file.name), Path("configs", file.name)):
            return file
    if not path.exists():
        raise ConfigError(
            f"{path}: cannot be read (no such file); the shipped configurations are "
            f"{', '.join(shipped())}"
        )
    return path


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
    try:
        text = untrusted.read(path, _MOST_BYTES).decode()
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:  # of the text's encoding or the path's
        raise ConfigError(f"{path}: not valid YAML ({error})") from None
    tree = _yaml(text, str(path))
    if not isinstance(tree, dict):
        raise ConfigError(f"{path}: must hold keys and values, such as 'steps: 100'")
    base = tree.pop("base", None)
    if base is None:
        return tree
    if not isinstance(base, str) or path.parent / base in (path, *above):
        got = untrusted.short(base)
        raise ConfigError(f"base: {path} must name another file beside it, got {got}")
    if len(above) == _MOST_FILES:  # the same ones by other names, such as a/../a/../x.yaml
        raise ConfigError(f"base: {path} has a base that has a base, more than {_MOST_FILES} times")
    below = _read(path.parent / base, (path, *above))
    if isinstance(tree.get("data"), dict) and "source" in tree["data"]:
        _drop_for_other_sources(below, tree["data"]["source"])
    return _merge(below, tree)


class _Loader(yaml.SafeLoader):
    """Refuses a key that stands twice, of which the library would drop one."""

    def compose_mapping_node(self, anchor: Any) -> yaml.MappingNode:
        node = super().compose_mapping_node(anchor)
        found = set[tuple[str, str]]()
        for key, _ in node.value:
            if isinstance(key, yaml.ScalarNode):
                if (key.tag, key.value) in found:
                    shown, line = untrusted.short(key.value), key.start_mark.line + 1
                    raise ValueError(f"{shown} stands twice, in line {line}; leave one out")
                found.add((key.tag, key.value))
        return node


def _yaml(text: str, where: str) -> Any:
    try:
        return yaml.load(text, _Loader)
    except Exception as error:  # besides its own the library lets others through
        reason = "nested too deeply" if isinstance(error, RecursionError) else str(error)
        raise ConfigError(f"{where}: not valid YAML ({' '.join(reason.split())})") from None


def _merge(base: dict[str, Any], tree: dict[str, Any]) -> dict[str, Any]:
    merged = dict(base)
    for key, value in tree.items():
        nested = isinstance(value, dict) and isinstance(base.get(key), dict)
        merged[key] = _merge(base[key], value) if nested else value
    return merged


def _drop_for_other_sources(tree: dict[str, Any], source: Any) -> None:
    """Drops the keys of `data` that `source` does not use."""
    if isinstance(tree.get("data"), dict):
        for name, sources in ONLY_FOR.items():
            if source not in sources:
                tree["data"].pop(name, None)


def _parse(override: str) -> tuple[list[str], Any]:
    """The parts of an override's key, and its value."""
    key, equals, value = override.partition("=")
    if not (key and equals):
        raise ConfigError(f"{override!r}: an override is written key=value, such as steps=100")
    keys = key.split(".")
    if key not in Config.model_fields and len(found := _ending_in(key)) == 1:
        keys = found[0].split(".")
    kind = _keys().get(".".join(keys))
    if kind in (str, str | None):
        return keys, None if value in _NULLS else value
    if kind == tuple[str, ...] and value not in _NULLS and not value.startswith("["):
        return keys, [value]
    return keys, _yaml(value, key)


@functools.cache
def _keys() -> dict[str, Any]:
    """What every key holds, by its whole name."""

    def of(section: type[Section], prefix: str) -> Iterator[tuple[str, Any]]:
        for name, field in section.model_fields.items():
            if inner := _section_of(field.annotation):
                yield from of(inner, f"{prefix}{name}.")
            else:
                yield f"{prefix}{name}", field.annotation

    return dict(of(Config, ""))


def _ending_in(name: str) -> list[str]:
    """The whole names of the keys with this last name."""
    return [key for key in _keys() if key.rpartition(".")[2] == name]


def _set(tree: dict[str, Any], keys: list[str], value: Any) -> None:
    *parents, leaf = keys
    for parent in parents:
        if tree.get(parent) is None:  # as in a file that --print-config wrote
            tree[parent] = {}
        tree = tree[parent]
        if not isinstance(tree, dict):
            raise ConfigError(
                f"{'.'.join(keys)}: {parent} is a single value and has no keys of its own"
            )
    tree[leaf] = value


def _one_line(error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section = _section(error["loc"][:-1])
        allowed = list(section.model_fields) if section else []
        name = str(error["loc"][-1])
        close = _ending_in(name) or difflib.get_close_matches(name, allowed, n=1)
        hint = f"did you mean {' or '.join(close)}? " if close else ""
        return f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{key}: required, but not given"
    if error["type"] == "value_error":  # raised by a section's _check, which names the key
        return str(error["ctx"]["error"])
    message = f"{error['msg'][0].lower()}{error['msg'][1:]}".replace("tuple", "list")
    message, *_ = message.split(" or instance of")
    return f"{key}: {message}, got {untrusted.short(error['input'])}"


def _section(path: tuple[str | int, ...]) -> type[Section] | None:
    section: Any = Config
    for name in path:
        section = _section_of(section.model_fields[name].annotation)
    return section


def _section_of(annotation: Any) -> type[Section] | None:
    """The section that a key holds, perhaps or null; None if it holds something else."""
    kinds = get_args(annotation) or (annotation,)
    sections = (kind for kind in kinds if isinstance(kind, type) and issubclass(kind, Section))
    return next(sections, None)


def _describe(section: type[Section], prefix: str) -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        if inner := _section_of(field.annotation):
            if field.default is None:
                lines += [f"  {prefix}{name}: keys as below = None", f"      {field.description}"]
            lines += _describe(inner, prefix=f"{prefix}{name}.")
            continue
        kind = str(field.annotation).replace("typing.", "").replace("tuple", "list")
        if isinstance(field.annotation, type) and not get_args(field.annotation):
            kind = field.annotation.__name__
        value = list(field.default) if isinstance(field.default, tuple) else field.default
        default = "" if field.is_required() else f" = {value}"
        lines.append(f"  {prefix}{name}: {kind}{default}\n      {field.description or ''}".rstrip())
    return lines

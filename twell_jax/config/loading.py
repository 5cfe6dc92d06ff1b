"""Reads a YAML file and overrides from the command line into a checked `Config`, and writes it."""

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from twell_jax.config.sections import Config, ConfigError, Section

_SHIPPED = Path(__file__).parents[1] / "configs"  # in a clone a link to the repository's configs/


def load(name: str | Path, overrides: Sequence[str] = ()) -> Config:
    """Reads a configuration and applies `key.subkey=value` overrides (values are YAML too).

    A file may name another file in its directory as its `base` and give only what differs.

    Args:
      name: a YAML file or, where there is no such file, the name of a shipped configuration:
        "tiny", "tiny.yaml" or "configs/tiny.yaml".
      overrides: later ones win.

    Raises:
      ConfigError: the message, one line, names the file or key and what is allowed.
    """
    tree = read(_find(Path(name)))
    for override in overrides:
        _override(tree, override)
    return from_dict(tree)


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


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    shipped = {file.stem: file for file in sorted(_SHIPPED.glob("*.yaml"))}
    for name, file in shipped.items():
        if path in (Path(name), Path(file.name), Path("configs", file.name)):
            return file
    if not path.exists():
        raise ConfigError(
            f"{path}: cannot be read (no such file); the shipped configurations are "
            f"{', '.join(shipped)}"
        )
    return path


def _read(path: Path, above: tuple[Path, ...]) -> dict[str, Any]:
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


def _one_line(error: ErrorDetails) -> str:
    key = ".".join(str(part) for part in error["loc"])
    if error["type"] == "extra_forbidden":
        section = _section(error["loc"][:-1])
        allowed = list(section.model_fields) if section else []
        close = difflib.get_close_matches(str(error["loc"][-1]), allowed, n=1)
        hint = f"did you mean {close[0]}? " if close else ""
        return f"{key}: unknown key; {hint}allowed: {', '.join(allowed)}"
    if error["type"] == "missing":
        return f"{key}: required, but not given"
    if error["type"] == "value_error":  # raised by a section's _check, which names the key
        return str(error["ctx"]["error"])
    return f"{key}: {error['msg'][0].lower()}{error['msg'][1:]}, got {error['input']!r}"


def _section(path: tuple[str | int, ...]) -> type[Section] | None:
    section: Any = Config
    for name in path:
        section = section.model_fields[name].annotation
    return section


def _describe(section: type[Section], prefix: str) -> list[str]:
    lines = []
    for name, field in section.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, Section):
            lines += _describe(field.annotation, prefix=f"{prefix}{name}.")
            continue
        kind = getattr(field.annotation, "__name__", str(field.annotation))
        if not isinstance(field.annotation, type):
            kind = str(field.annotation).replace("typing.", "")
        default = "" if field.is_required() else f" = {field.default}"
        lines.append(f"  {prefix}{name}: {kind}{default}\n      {field.description or ''}".rstrip())
    return lines

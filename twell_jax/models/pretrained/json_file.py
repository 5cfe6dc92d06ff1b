"""Reads the JSON files of a model, and says in one line what is wrong with them."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from twell_jax import untrusted
from twell_jax.ffn.numeric import is_number

_MOST_BYTES = 2**26  # the index of the largest models has 2**23


class PretrainedError(ValueError):
    """A directory that cannot be loaded, or a model that cannot be saved; the message says why.

    It is one line, whatever names of others are in it.
    """

    def __init__(self, message: str) -> None:
        super().__init__(untrusted.plain(message))


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
      PretrainedError: the file cannot be read or holds no JSON object.
    """
    try:
        tree = json.loads(untrusted.read(path, _MOST_BYTES).decode())
    except OSError as error:
        raise PretrainedError(f"{path}: cannot be read ({error.strerror})") from None
    except ValueError as error:
        raise PretrainedError(f"{path}: not valid JSON ({error})") from None
    except RecursionError:
        raise PretrainedError(f"{path}: not valid JSON (nested too deeply)") from None
    if not isinstance(tree, dict):
        raise PretrainedError(f"{path}: must hold an object")
    return tree


def first(*values: Any) -> Any:
    """The first value that is not None; None if all are."""
    return next((value for value in values if value is not None), None)


def unsupported(path: Path, key: str, value: Any, supported: Iterable[Any]) -> PretrainedError:
    """The error of a key whose value `Transformer` does not support."""
    allowed = " or ".join(repr(value) for value in supported)
    given = untrusted.short(value)
    return PretrainedError(f"{path}: {key}={given} is not supported; it must be {allowed}")


def positive(path: Path, key: str, value: Any) -> float:
    """The value of a key that must be a positive number.

    Raises:
      PretrainedError: it is not.
    """
    if not is_number(value) or value <= 0:
        raise PretrainedError(
            f"{path}: {key} must be a positive number, got {untrusted.short(value)}"
        )
    return value

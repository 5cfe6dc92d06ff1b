"""Reads the documents of JSON Lines, and of files named .json that hold records."""

import json
from collections.abc import Iterator
from functools import partial
from pathlib import Path

from twell_jax import untrusted
from twell_jax.config import ConfigError
from twell_jax.data.documents import Document, text_of
from twell_jax.data.records import Reader
from twell_jax.data.text_files import read as read_file

_MOST_OF_A_LINE = 2**28  # bytes


def documents(path: Path, reader: Reader) -> Iterator[Document] | None:
    """The documents of a file named .json, or None if it is a text like any other.

    It holds documents if it is an array of objects, JSON Lines, or one object that is a record.

    Raises:
      ConfigError: it begins as an array of objects, but is no JSON, or cannot be read. What the
        iterator raises is as in `lines`.
    """
    raw = read_file(path).removeprefix(b"\xef\xbb\xbf").lstrip()
    begins_as_array = raw.startswith(b"[") and raw[1:].lstrip().startswith(b"{")
    if not (begins_as_array or raw.startswith(b"{")):
        return None
    try:
        tree = json.loads(raw)
    except RecursionError:
        return None
    except ValueError as error:
        if begins_as_array:
            raise ConfigError(
                f"data.paths: {path}: begins as an array of objects, but is no JSON ({error}); "
                "mend it, or give it another ending than .json to read it as a text"
            ) from None
        return lines(path, reader) if _is_object(raw.split(b"\n", 1)[0]) else None
    if isinstance(tree, dict):
        tree = [tree] if set(reader.fields) <= tree.keys() else []
    if not tree:
        return None
    return (
        _document(record, reader, f"{path}: object {number}")
        for number, record in enumerate(tree, start=1)
    )


def lines(path: Path, reader: Reader) -> Iterator[Document]:
    """Yields the document of each line of JSON Lines, apart from blank ones.

    Raises:
      ConfigError: a line holds none; the message names the file and the line.
    """
    with untrusted.open_file(path) as file:
        found = iter(partial(file.readline, _MOST_OF_A_LINE + 1), b"")
        for number, line in enumerate(found, start=1):
            where = f"{path}:{number}"
            if len(line) > _MOST_OF_A_LINE:
                most = f"{_MOST_OF_A_LINE >> 20} MiB"
                raise ConfigError(f"data.paths: {where}: a line of more than {most}")
            if line.isspace():
                continue
            try:
                record = json.loads(line)
            except ValueError as error:
                raise ConfigError(f"data.paths: {where}: {error}") from None
            except RecursionError:
                raise ConfigError(f"data.paths: {where}: nested too deeply") from None
            yield _document(record, reader, where)


def _document(record: object, reader: Reader, where: str) -> Document:
    try:
        document = reader.document(record)
        text_of(document).encode()  # JSON can spell half a surrogate pair, which is no text
    except ValueError as error:
        raise ConfigError(f"data.paths: {where}: {error}") from None
    return document


def _is_object(line: bytes) -> bool:
    try:
        return isinstance(json.loads(line), dict)
    except (ValueError, RecursionError):
        return False

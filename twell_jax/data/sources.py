"""Documents: where they come from, and which of them are held out for evaluation.

A document is a text file, a line of a JSONL file, an object of an array in a JSON file, or a row of
a Hugging Face dataset. Documents are trained on or held out whole, unless there are too few.
"""

import glob
import hashlib
import io
import logging
import sysconfig
import tokenize
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

from twell_jax.config import ConfigError, DataConfig
from twell_jax.data import json_files, records
from twell_jax.data.documents import Document, divided, text_of
from twell_jax.data.text_files import holds_lines
from twell_jax.data.text_files import read as read_document

log = logging.getLogger(__name__)


def is_held_out(text: str, fraction: float) -> bool:
    """Whether a document belongs to the held-out split.

    A hash of the text decides. So no list of documents is needed, paths do not matter, and copies
    of a document are never in both splits.
    """
    digest = hashlib.blake2b(text.encode(), digest_size=8).digest()
    return int.from_bytes(digest) < fraction * 2**64


def by_document(documents: Iterable[Document], fraction: float) -> Iterator[tuple[Document, bool]]:
    """Yields each document and whether it is held out."""
    for document in documents:
        yield document, is_held_out(text_of(document), fraction)


def by_position(
    documents: Iterable[Document], fraction: float, characters: int
) -> Iterator[tuple[Document, bool]]:
    """Yields documents and whether they are held out: all before one position, or after it.

    The document at the position is divided.

    Args:
      documents: all of them, in order.
      fraction: share of the characters after the position.
      characters: number of characters of all documents.
    """
    position = int(characters * (1 - fraction))
    for document in documents:
        before, after = divided(document, position)
        position -= len(text_of(before))
        if text_of(before) or not text_of(after):
            yield before, False
        if text_of(after):
            yield after, True


def text_files(data: DataConfig) -> list[Path]:
    """The files of source `stdlib` or `files`, sorted by path.

    Raises:
      ConfigError: there are no files, or a pattern matches none.
    """
    if data.source == "files":
        return expand(data.paths, key="data.paths")
    root = Path(sysconfig.get_paths()["stdlib"])
    paths = sorted(
        path
        for path in root.rglob("*.py")
        if not {"site-packages", "__pycache__"} & set(path.relative_to(root).parts)
    )
    if not paths:
        raise ConfigError(f"data.source: no .py files in {root}; name your own with source=files")
    return paths


def expand(patterns: Sequence[str], *, key: str) -> list[Path]:
    """The files that have these names or match these globs (`**` descends), sorted, each once.

    Raises:
      ConfigError: a pattern matches no file; the message begins with `key`.
    """
    found: set[Path] = set()
    for pattern in patterns:
        names = [pattern] if Path(pattern).is_file() else glob.glob(pattern, recursive=True)
        matches = [path for path in map(Path, names) if path.is_file()]
        if not matches:
            raise ConfigError(
                f"{key}: {pattern!r} matches no file (all files of a directory: 'directory/**/*')"
            )
        found.update(path.absolute() for path in matches)
    return sorted(found)


def documents(paths: Sequence[Path], data: DataConfig) -> Iterator[Document]:
    """Reads the documents of files from `text_files`, one at a time.

    A .jsonl or .ndjson file holds a document per line, apart from blank lines, and a .json file one
    per object if it is an array of objects or JSON Lines (`json_files`); any other file is one
    document. User files must be UTF-8 (`text_files.digests` finds those that are not). Files of the
    standard library have the encoding that they declare. A few violate it on purpose, as input of
    the parser's tests; they are read as UTF-8 with U+FFFD for every undecodable byte.

    Raises:
      ConfigError: a document cannot be read; the message names the file and the line or byte.
    """
    reader = records.reader(data)
    for path in paths:
        if data.source == "stdlib":
            yield _decode_python(read_document(path))
        elif holds_lines(path):
            yield from json_files.lines(path, reader)
        elif (
            path.suffix.lower() == ".json"
            and (found := json_files.documents(path, reader)) is not None
        ):
            yield from found
        elif data.format == "text":
            yield _decode_utf8(path)
        else:
            raise ConfigError(
                f"data.paths: {path}: holds no records, which data.format={data.format} needs: "
                "JSON Lines, or an array of objects in a file named .json"
            )


def _decode_python(raw: bytes) -> str:
    try:
        encoding, _ = tokenize.detect_encoding(io.BytesIO(raw).readline)
        return raw.decode(encoding)
    except (SyntaxError, UnicodeDecodeError):
        return raw.decode(errors="replace")


def _decode_utf8(path: Path) -> str:
    try:
        return read_document(path).decode()
    except UnicodeDecodeError as error:
        raise ConfigError(f"data.paths: {path}: not UTF-8 text at byte {error.start}") from None


class StreamedDocuments(Iterator[Document]):
    """One pass over a Hugging Face dataset (a name, or a local directory), read as a stream.

    Rows whose text, or another field that makes the document, is null are left out. The first of
    them is warned of, and then each whose number among them is a power of ten.

    Args:
      data: names the dataset, its subset, split and text field.
      position: where to continue: the `position` of an earlier pass, or None for the beginning.
      warns: whether rows that are left out are warned of.

    Raises:
      ConfigError: the `datasets` library is missing, the dataset cannot be opened or read, or a row
        makes no document, or has a null although `data.strict` is set. The message names the row;
        the first is row 1.
    """

    def __init__(
        self, data: DataConfig, position: dict[str, Any] | None = None, *, warns: bool = True
    ) -> None:
        try:
            import datasets
        except ImportError:
            raise ConfigError(
                "data.source: hf needs the Hugging Face datasets library: "
                "in your clone, pip install -e '.[hf]'"
            ) from None
        try:
            self._dataset = datasets.load_dataset(
                data.name, data.subset, split=data.split, streaming=True
            )
        except Exception as error:  # the library lets those of all formats through
            raise ConfigError(f"data.name: {data.name}: {_in_a_line(error)}") from None
        self._read = self._left_out = 0
        if position is not None:
            # In checkpoints of 0.2 it is that of the dataset alone, and rows are counted from it.
            self._dataset.load_state_dict(position.get("dataset", position))
            self._read, self._left_out = position.get("rows", (0, 0))
        self._position = position
        self._rows = iter(self._dataset)
        self._data, self._warns = data, warns
        self._reader = records.reader(data)

    @property
    def position(self) -> dict[str, Any] | None:
        """How far the pass has read: a small JSON-serialisable record."""
        return self._position

    def __next__(self) -> Document:
        while (document := self._next_document()) is None:
            self._left_out += 1
            fields = " or ".join(map(repr, self._reader.fields))
            if self._warns and self._left_out == 10 ** (len(str(self._left_out)) - 1):
                log.warning(
                    "data.name: %s: row %d is left out, as its field %s is null; of the rows so "
                    "far that is so for %d; data.strict=true makes it an error",
                    *(self._data.name, self._read, fields, self._left_out),
                )
        rows = [self._read, self._left_out]
        self._position = {"dataset": self._dataset.state_dict(), "rows": rows}
        return document

    def _next_document(self) -> Document | None:
        """The document of the next row; None if the row is to be left out."""
        data = self._data
        self._read += 1
        try:
            row = next(self._rows)
            if not data.strict and self._reader.lacks(row):
                return None
            return self._reader.document(row)
        except StopIteration:
            raise
        except Exception as error:  # such as of a compressed file that is cut short
            hint = "; data.strict=false leaves out rows whose text is null" if data.strict else ""
            raise ConfigError(
                f"data.name: {data.name}: row {self._read}: {_in_a_line(error)}{hint}"
            ) from None


def _in_a_line(error: Exception) -> str:
    """What an error says, behind its name unless it is one of those that say it all."""
    name = "" if isinstance(error, ValueError | OSError) else f"{type(error).__name__}: "
    return name + " ".join(str(error).split())


def streamed(data: DataConfig, *, held_out: bool) -> Iterator[Document]:
    """One pass over the training or the held-out documents of a stream; it warns of no rows."""
    for document in StreamedDocuments(data, warns=False):
        if is_held_out(text_of(document), data.held_out_fraction) == held_out:
            yield document

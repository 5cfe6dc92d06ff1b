"""Reads text files once before they are used: for their digests, and to find what is no text."""

import hashlib
import logging
from collections.abc import Sequence
from pathlib import Path

from twell_jax import untrusted
from twell_jax.config import ConfigError, DataConfig

_NAMED = 5  # of the files that a warning counts
_MOST_BYTES = 2**33  # of a document, which is in memory as a whole
_OTHER_SOURCES = {".parquet": "hf", ".arrow": "hf", ".npy": "tokens"}

log = logging.getLogger(__name__)


def digests(paths: Sequence[Path], data: DataConfig) -> dict[Path, str]:
    """The BLAKE2b digest of each file that can be read as text, in the given order.

    Files of source `files` that are not UTF-8 are left out; a warning counts and names them. A
    second one counts files with null characters, which are probably not text. Files of JSON Lines
    are judged later, line by line.

    Raises:
      ConfigError: a file is not UTF-8 although `data.strict` is set, or none is.
    """
    found: dict[Path, str] = {}
    broken, binary = [], []
    for path in paths:
        if data.source != "files" or holds_lines(path):
            with untrusted.open_file(path) as file:
                found[path] = hashlib.file_digest(file, "blake2b").hexdigest()
            continue
        raw = read(path)
        try:
            raw.decode()
        except UnicodeDecodeError as error:
            broken.append(f"{path} (at byte {error.start}{_hint(path)})")
            continue
        if b"\0" in raw:
            binary.append(str(path))
        found[path] = hashlib.blake2b(raw).hexdigest()
    if broken and (data.strict or not found):
        raise ConfigError(
            f"data.paths: {_count(broken, paths)} not UTF-8 text: {_first(broken)}; convert such "
            "files" + (", leave them out, or write data.strict=false" if data.strict else "")
        )
    if broken:
        log.warning(
            "data.paths: %s not UTF-8 text and left out: %s", _count(broken, paths), _first(broken)
        )
    if binary:
        log.warning(
            "data.paths: %s read as text, but with null characters: %s",
            _count(binary, paths),
            _first(binary),
        )
    return found


def holds_lines(path: Path) -> bool:
    """Whether a file holds JSON Lines, by its name."""
    return path.suffix.lower() in (".jsonl", ".ndjson")


def read(path: Path) -> bytes:
    """The bytes of a file that is one document.

    Raises:
      ConfigError: it cannot be read, is not a regular file or does not fit into memory.
    """
    try:
        return untrusted.read(path, _MOST_BYTES)
    except OSError as error:
        raise ConfigError(f"data.paths: {path}: cannot be read ({error.strerror})") from None


def _hint(path: Path) -> str:
    source = _OTHER_SOURCES.get(path.suffix)
    return f"; data.source={source} reads such files" if source else ""


def _count(some: Sequence[str], paths: Sequence[Path]) -> str:
    return f"{len(some)} of {len(paths)} files {'is' if len(some) == 1 else 'are'}"


def _first(names: Sequence[str]) -> str:
    return untrusted.plain(", ".join([*names[:_NAMED], *(["..."] if len(names) > _NAMED else [])]))

"""A cache of directories that several processes may share and a killed one cannot corrupt."""

import hashlib
import json
import logging
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import filelock

from twell_jax import untrusted

_FORMAT = 1  # part of every key; raise it when the meaning of the stored files changes
_MANIFEST = "manifest.json"
_MOST_BYTES = 2**26  # of it

log = logging.getLogger(__name__)


def entry(cache_dir: Path, key: Mapping[str, Any], build: Callable[[Path], None]) -> Path:
    """Returns the directory of this key; calls `build` to fill it if there is none.

    One process builds while others that want the same entry wait. The entry gets its name only when
    it is complete, and the next builder removes what a killed one left. An entry is built again,
    with a warning, if its files are not those that were built: their digests are compared with the
    manifest's, which reads every file once. A whole one is only read, so that its directory may be
    read-only.

    Args:
      cache_dir: holds all entries; created if missing.
      key: everything that the content depends on, JSON-serialisable.
      build: fills the empty directory that it gets.
    """
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    complete, partial = cache_dir / name, cache_dir / f"{name}.partial"
    if _is_intact(complete):  # nobody removes a whole one, so this needs no lock
        return complete
    cache_dir.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache_dir / f"{name}.lock"):
        if complete.exists():
            if _is_intact(complete):
                return complete
            log.warning("%s is damaged, or of an older version, and built again", complete)
            shutil.rmtree(complete)
        if partial.exists():  # we hold the lock, so its builder is dead
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            build(partial)
            manifest = json.dumps(_digests(partial), indent=1)
            (partial / _MANIFEST).write_text(manifest)
            os.replace(partial, complete)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return complete


def _digests(directory: Path) -> dict[str, str]:
    digests = {}
    for path in directory.iterdir():
        if path.name != _MANIFEST:
            with path.open("rb") as file:
                digests[path.name] = hashlib.file_digest(file, "blake2b").hexdigest()
    return digests


def _is_intact(directory: Path) -> bool:
    try:
        manifest = untrusted.read(directory / _MANIFEST, _MOST_BYTES)
        return json.loads(manifest) == _digests(directory)
    except (OSError, ValueError):
        return False

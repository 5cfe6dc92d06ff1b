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
    with a warning, if the sizes of its files have changed.

    Args:
      cache_dir: holds all entries; created if missing.
      key: everything that the content depends on, JSON-serialisable.
      build: fills the empty directory that it gets.
    """
    text = json.dumps({"format": _FORMAT, **key}, sort_keys=True)
    name = hashlib.sha256(text.encode()).hexdigest()[:32]
    complete, partial = cache_dir / name, cache_dir / f"{name}.partial"
    cache_dir.mkdir(parents=True, exist_ok=True)
    with filelock.FileLock(cache_dir / f"{name}.lock"):
        if complete.exists():
            if _is_intact(complete):
                return complete
            log.warning("%s is damaged and built again", complete)
            shutil.rmtree(complete)
        if partial.exists():  # we hold the lock, so its builder is dead
            shutil.rmtree(partial)
        partial.mkdir()
        try:
            build(partial)
            manifest = json.dumps(_sizes(partial), indent=1)
            (partial / _MANIFEST).write_text(manifest)
            os.replace(partial, complete)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
    return complete


def _sizes(directory: Path) -> dict[str, int]:
    return {
        path.name: path.stat().st_size for path in directory.iterdir() if path.name != _MANIFEST
    }


def _is_intact(directory: Path) -> bool:
    try:
        return json.loads(untrusted.read(directory / _MANIFEST, _MOST_BYTES)) == _sizes(directory)
    except (OSError, ValueError):
        return False

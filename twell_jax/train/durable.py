"""Writes that a killed process cannot cut short, and that a power cut cannot undo."""

import errno
import os
from pathlib import Path

TEMPORARY = ".tmp"  # ends the names of files that are being written


def write_atomically(path: Path, text: str) -> None:
    """Writes a file that is the old or the new one, whole, whatever ends the process or the power.

    It is the new one for good when this returns.
    """
    temporary = path.with_name(f"{path.name}{TEMPORARY}")
    temporary.write_text(text, encoding="utf-8")
    _sync(temporary)
    temporary.replace(path)
    _sync(path.parent)


def sync_tree(directory: Path) -> None:
    """Returns when all that a directory holds, and its own name, are on the disk."""
    for path in (*directory.rglob("*"), directory, directory.parent):
        _sync(path)


def _sync(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        if error.errno != errno.EINVAL:  # of directories on file systems that keep no names back
            raise
    finally:
        os.close(descriptor)

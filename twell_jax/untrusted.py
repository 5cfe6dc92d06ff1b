"""What someone else wrote: regular files of bounded size, names inside a directory, plain lines.

Files and names may come from a model of the hub, a corpus or another person's run. A pipe or a
device would be read without end, a name may lead out of its directory, and its escapes may change
what a terminal shows.
"""

import errno
import io
import os
import reprlib
import stat
from pathlib import Path, PurePath
from typing import Any

_CHUNK = 2**20
_LINE = 4000  # characters of a message

_short = reprlib.Repr()  # also of values that refer to themselves
_short.maxstring = _short.maxlong = _short.maxother = 100


def require_regular(path: Path) -> None:
    """Looks at a file before someone opens it: only to open a pipe or a device may wait or act.

    Raises:
      OSError: there is no such file, or it is neither regular nor a directory, which nobody opens
        by mistake; `strerror` says it.
    """
    mode = os.stat(path).st_mode
    if not (stat.S_ISREG(mode) or stat.S_ISDIR(mode)):
        raise OSError(errno.EINVAL, "not a regular file", str(path))


def open_file(path: Path) -> io.BufferedReader:
    """Opens a file to be read.

    Raises:
      OSError: it cannot be opened or is not a regular file; `strerror` says why.
    """
    require_regular(path)
    return path.open("rb")


def read(path: Path, most: int) -> bytes:
    """Reads a file of at most so many bytes.

    Raises:
      OSError: it cannot be read, is not a regular file or is larger; `strerror` says why.
    """
    chunks = []
    with open_file(path) as file:
        size = os.fstat(file.fileno()).st_size  # 0 in /proc, whatever there is to read
        while size <= most and (chunk := file.read(_CHUNK)):
            chunks.append(chunk)
            size = max(size, file.tell())
    if size > most:
        raise OSError(errno.EFBIG, f"larger than {most / 2**20:g} MiB", str(path))
    return b"".join(chunks)


def is_inside(name: str) -> bool:
    """Whether a name, joined to a directory as a path, leads to something in that directory."""
    path = PurePath(name)
    leaves = path.is_absolute() or ".." in path.parts
    return bool(path.parts) and not leaves and "\0" not in name


def plain(text: str) -> str:
    """A text as one line without control characters, which are spelt out, and of bounded length.

    Line breaks become spaces.
    """
    text = " ".join(text[: _LINE + 1].splitlines())
    shown = text if len(text) <= _LINE else f"{text[:_LINE]}..."
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in shown)


def short(value: Any) -> str:
    """What `repr` gives, of bounded length."""
    return _short.repr(value)

"""Keeps off the terminal what Orbax and asyncio say when a checkpoint cannot be read or written.

For one cause they log hundreds of lines, some of them from threads that end later. The caller names
the cause in one line; everything else goes to a file.
"""

import inspect
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

_SOURCES = "absl", "asyncio"  # Orbax logs by way of absl


class _File(logging.Handler):
    """Appends records to the file at `path`; what cannot be written, as on a full disk, is lost."""

    path: Path
    written = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self.path.open("a") as file:
                file.write(f"{self.format(record)}\n")
            self.written = True
        except OSError:
            pass


_file = _File(logging.WARNING)
_file.setFormatter(logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s"))
_show_unraisable = sys.unraisablehook


def divert_to(path: Path) -> None:
    """From now on, messages go to the end of the file at `path`, created with the first of them."""
    global _show_unraisable
    _file.path, _file.written = path, False
    for logger in map(logging.getLogger, _SOURCES):
        logger.propagate = False
        if _file not in logger.handlers:
            logger.addHandler(_file)
    warnings.filterwarnings("ignore", r"coroutine 'Store\.", RuntimeWarning)  # Orbax's, at an error
    if sys.unraisablehook is not _divert_unraisable:
        _show_unraisable, sys.unraisablehook = sys.unraisablehook, _divert_unraisable


def add(message: str, error: Exception) -> None:
    """Adds an error with its traceback to the file."""
    record = logging.getLogger(__name__).makeRecord(
        __name__, logging.ERROR, "", 0, message, (), (type(error), error, error.__traceback__)
    )
    _file.handle(record)


def where() -> str:
    """Words that end a message: where there is more, if there is."""
    return f"; details: {_file.path}" if _file.written else ""


def _divert_unraisable(unraisable: Any) -> None:
    """Takes what is left of coroutines whose event loop ended with the first error of several."""
    error = unraisable.exc_value
    if inspect.iscoroutine(unraisable.object) or str(error) == "Event loop is closed":
        add("left behind by an earlier error", error)
    else:
        _show_unraisable(unraisable)

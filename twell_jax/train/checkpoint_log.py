"""What Orbax says when a checkpoint cannot be read or written goes to a file beside the run's."""

import inspect
import logging
import sys
import warnings
from pathlib import Path
from typing import Any

_NOISY = "absl", "asyncio"  # loggers; Orbax logs by way of absl


class _LogFile(logging.Handler):
    """Keeps off the terminal what Orbax says when a checkpoint cannot be read or written.

    For one cause Orbax and asyncio log hundreds of lines, some of them from threads that end later.
    We name the cause in one line; everything else is added to the file at `path`. What cannot be
    written there, as on a full disk, is lost.
    """

    path: Path
    written = False

    def emit(self, record: logging.LogRecord) -> None:
        try:
            with self.path.open("a") as file:
                file.write(f"{self.format(record)}\n")
            self.written = True
        except OSError:
            pass


_log_file = _LogFile(logging.WARNING)
_log_file.setFormatter(
    logging.Formatter("%(asctime)s %(process)d %(levelname)s %(name)s: %(message)s")
)
_show_unraisable = sys.unraisablehook


def divert_messages(path: Path) -> None:
    """From now on, messages go to the end of the file at `path`, created with the first of them."""
    global _show_unraisable
    _log_file.path, _log_file.written = path, False
    for logger in map(logging.getLogger, _NOISY):
        logger.propagate = False
        if _log_file not in logger.handlers:
            logger.addHandler(_log_file)
    warnings.filterwarnings("ignore", r"coroutine 'Store\.", RuntimeWarning)  # Orbax's, at an error
    if sys.unraisablehook is not _divert_unraisable:
        _show_unraisable, sys.unraisablehook = sys.unraisablehook, _divert_unraisable


def add_to_log(message: str, error: Exception) -> None:
    """Adds an error with its traceback to the file."""
    record = logging.getLogger(__name__).makeRecord(
        __name__, logging.ERROR, "", 0, message, (), (type(error), error, error.__traceback__)
    )
    _log_file.handle(record)


def where_more_is() -> str:
    """Words that end a message: where there is more, if there is."""
    return f"; details: {_log_file.path}" if _log_file.written else ""


def _divert_unraisable(unraisable: Any) -> None:
    """Takes what is left of coroutines whose event loop ended with the first error of several."""
    error = unraisable.exc_value
    if inspect.iscoroutine(unraisable.object) or str(error) == "Event loop is closed":
        add_to_log("left behind by an earlier error", error)
    else:
        _show_unraisable(unraisable)

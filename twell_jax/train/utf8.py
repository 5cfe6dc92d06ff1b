"""Commands run in UTF-8 where the locale knows ASCII alone, as a path or a text may have more.

What they print may have characters that the encoding of the output lacks.
"""

import io
import os
import sys


def ensure() -> None:
    """Starts the process again, in UTF-8, where Python was told to follow such a locale.

    Python itself leaves the locale C for UTF-8, unless PYTHONUTF8=0 forbids it. The variable is
    inherited by what the command starts. Characters that stdout cannot write, such as those of a
    generated text in Latin-1 or of a path that is no UTF-8, are spelt out, as those of stderr are.
    """
    if sys.getfilesystemencoding() == "ascii" and os.environ.get("PYTHONUTF8") != "1":
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(sys.executable, command, {**os.environ, "PYTHONUTF8": "1"})
    if isinstance(sys.stdout, io.TextIOWrapper) and sys.stdout.errors == "strict":
        sys.stdout.reconfigure(errors="backslashreplace")

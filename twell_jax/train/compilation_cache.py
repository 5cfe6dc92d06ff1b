"""Commands keep the programs that they compile, by JAX's persistent compilation cache.

They lie in `compiled` of the user's cache directory. What the user says of JAX's cache holds: with
JAX_COMPILATION_CACHE_DIR it is as JAX has it, and JAX_ENABLE_COMPILATION_CACHE=false turns it off.
"""

import contextlib
import glob
import os
import re
import sys
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import filelock
import jax

from twell_jax import user_cache

HELP = """\
Programs that took long to compile are kept in ~/.cache/twell-jax/compiled for the next time.
JAX_ENABLE_COMPILATION_CACHE=false turns it off, TWELL_JAX_CACHE names another directory.
"""

_SETTINGS = {
    "jax_persistent_cache_min_compile_time_secs": 0.1,  # most small ones take less
    "jax_compilation_cache_max_size": 2**30,  # bytes; JAX removes what was used longest ago
}
_PROBLEM = re.compile(r"Error (reading|writing) persistent compilation cache entry for '(.+?)': ")


def enable() -> None:
    """From now on, JAX keeps compiled programs; call it in a command, before it compiles any.

    If the directory cannot be written, a line on stderr says so. One of several processes keeps
    none: JAX would write those of the first alone, which would then not take part where the others
    compile and XLA shares autotuning among them.
    """
    config = jax.config
    if config.jax_compilation_cache_dir is not None or not config.jax_enable_compilation_cache:
        return
    if jax.distributed.is_initialized():
        return
    try:
        directory = user_cache.directory() / "compiled"
        directory.mkdir(0o700, parents=True, exist_ok=True)  # JAX runs what it finds there
        # JAX takes this lock for each program, and would warn for each if it cannot.
        with filelock.FileLock(directory / ".lockfile", timeout=10):
            pass
    except OSError as error:
        print(
            f"warning: compiled programs are not kept: {error}; TWELL_JAX_CACHE names another "
            "directory, JAX_ENABLE_COMPILATION_CACHE=false does without",
            file=sys.stderr,
        )
        return
    for name, value in _SETTINGS.items():
        if name.upper() not in os.environ:
            config.update(name, value)
    config.update("jax_compilation_cache_dir", str(directory))
    warnings.showwarning = partial(_show, warnings.showwarning, directory)


def directory_of(name: str) -> Path | None:
    """Where commands keep something else that compiled programs follow from; None: nowhere."""
    kept = jax.config.jax_compilation_cache_dir
    if kept is None or not jax.config.jax_enable_compilation_cache:
        return None
    with contextlib.suppress(OSError):
        beside = user_cache.directory()
        return beside / name if kept == str(beside / "compiled") else None
    return None


def _show(
    show: Callable[..., None],
    directory: Path,
    message: Warning | str,
    *where: object,
    **more: object,
) -> None:
    """Shows a warning as `show` does, but JAX's about this cache in a line.

    A program that cannot be read is removed: JAX would never replace it, and warn every time.
    """
    text = str(message)
    problem = _PROBLEM.match(text)
    if problem is None:
        show(message, *where, **more)
        return
    what = "is not kept"
    if problem[1] == "reading":
        what = "cannot be read, and is compiled again"
        with contextlib.suppress(OSError):
            for path in directory.glob(f"{glob.escape(problem[2])}-*"):
                path.unlink()
    reason = text[problem.end() :].partition("\n")[0]
    print(f"warning: {directory}: {problem[2]} {what}: {reason}", file=sys.stderr)

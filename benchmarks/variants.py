"""Trains variants of a configuration one after the other, by the same commands as users."""

import os
import subprocess
import sys
from pathlib import Path

from twell_jax import config as config_lib

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"


def leave_memory() -> None:
    """Leaves the device's memory to the commands; this process only needs the device's name."""
    os.environ[_PREALLOCATE] = "false"


def train(
    config: Path, overrides: list[str], variant: str, changes: list[str]
) -> tuple[Path, list[str]]:
    """Trains a variant to its end in a directory of its own, or continues it there.

    Returns:
      The directory, which is inside the configuration's `run_dir`, and all overrides.
    """
    directory = Path(config_lib.load(config, overrides).run_dir)
    run_dir = directory / variant.replace(", ", "-").replace(" ", "-")
    settings = [*overrides, *changes, f"run_dir={run_dir}"]
    run("-m", "twell_jax.train", str(config), *settings, run_dir=run_dir)
    return run_dir, settings


def run(*command: str, run_dir: Path) -> None:
    """Runs `python COMMAND`, which works on `run_dir`.

    Raises:
      subprocess.CalledProcessError: the command failed.
    """
    environment = {k: v for k, v in os.environ.items() if k != _PREALLOCATE}
    # Most variants, and all their evaluations, run the same programs; a cache compiles them once.
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(run_dir.parent / "compiled"))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    subprocess.run([sys.executable, *command], check=True, env=environment)

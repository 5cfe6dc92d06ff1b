"""Trains variants of a configuration one after the other, by the same commands as users."""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax

from benchmarks import record
from twell_jax import config as config_lib
from twell_jax.config import ConfigError
from twell_jax.train import metrics
from twell_jax.train.run_directory import RunPaths

_PREALLOCATE = "XLA_PYTHON_CLIENT_PREALLOCATE"
_CACHE = "JAX_COMPILATION_CACHE_DIR"
_PROGRAMS = "compiled"  # the cache of the variants of a `run_dir`, in it


def parser(description: str | None, base: Path) -> argparse.ArgumentParser:
    """As `record.parser`, with `config`, by default `base`, and `overrides`."""
    made = record.parser(description)
    made.add_argument("config", nargs="?", type=Path, default=base)
    made.add_argument("overrides", nargs="*", metavar="key=value")
    return made


def leave_memory() -> None:
    """Leaves the device's memory to the commands; this process only needs the device's name."""
    os.environ[_PREALLOCATE] = "false"


def share_programs(run_dir: str) -> None:
    """This process, too, keeps compiled programs where the commands on variants of a run do."""
    jax.config.update("jax_compilation_cache_dir", str(Path(run_dir) / _PROGRAMS))
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


def settings(config: Path, overrides: list[str]) -> dict[str, Any]:
    """The settings that all variants share, by dotted key, without the directories."""
    loaded = config_lib.load(config, overrides)
    tree = loaded.model_dump(mode="json", exclude={"run_dir": True, "data": {"cache_dir"}})
    return {
        f"{section}.{key}" if key else section: value
        for section, values in tree.items()
        for key, value in (values.items() if isinstance(values, dict) else [("", values)])
    }


def rows_so_far(
    today: Path, resume: Sequence[Path], base: dict[str, Any], defaults: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows with which a record starts: those of other records, then its own.

    Args:
      today: the record, if it is there already.
      resume: records of other days or directories.
      base: the settings of now, to compare with those of the records.
      defaults: the same without overrides, for keys that are newer than a record.

    Raises:
      ConfigError: a record was measured on another device, or with other settings.
      OSError: one of `resume` cannot be read.
    """
    paths = [*resume, *([today] if today.exists() else [])]
    return [row for path in paths for row in rows_of(path, record.device(), base, defaults)]


def rows_of(
    path: Path, device: str, base: dict[str, Any], defaults: dict[str, Any]
) -> list[dict[str, Any]]:
    """The rows of a record; `device` and the settings are those of now, as for `rows_so_far`.

    Raises:
      ConfigError: the record was measured on another device, or with other settings.
      OSError: it cannot be read.
    """
    content = json.loads(path.read_text())
    if content["device"] != device:
        raise ConfigError(f"{path}: measured on {content['device']}, this is {device}")
    for key, now in base.items():
        if (before := content.get("base", {}).get(key, defaults[key])) != now:
            raise ConfigError(
                f"{key}: {path} was measured with {before!r}, now {now!r}; "
                "give the old value, or start anew in another --out"
            )
    return content["rows"]


def train(
    config: Path,
    overrides: list[str],
    variant: str,
    changes: list[str],
    *,
    seconds: float | None = None,
) -> tuple[Path, list[str]]:
    """Trains a variant in a directory of its own, or continues it there, unless it has ended.

    Args:
      config: the configuration of all variants.
      overrides: those of all variants.
      variant: its name, which names the directory, too.
      changes: the variant's own overrides.
      seconds: stops the run once `metrics.jsonl` counts so many. Such a run compiles everything
        itself, so that its pauses are those of a person's first run. None trains to the end.

    Returns:
      The directory, which is inside the configuration's `run_dir`, and all overrides.
    """
    loaded = config_lib.load(config, [*overrides, *changes])
    run_dir = Path(loaded.run_dir) / variant.replace(", ", "-").replace(" ", "-")
    given = [*overrides, *changes, f"run_dir={run_dir}"]
    command = "-m", "twell_jax.train", str(config), *given
    if seconds is not None:
        _run_for(seconds, *command, run_dir=run_dir)
    elif not _has_ended(run_dir, loaded.steps):
        run(*command, run_dir=run_dir)
    return run_dir, given


def _has_ended(run_dir: Path, steps: int) -> bool:
    """Whether a run has done all its steps and the evaluation after them."""
    records = metrics.read(RunPaths(run_dir).metrics)
    return bool(records) and records[-1]["step"] == steps and "held_out_ce" in records[-1]


def run(*command: str, run_dir: Path) -> None:
    """Runs `python COMMAND`, which works on `run_dir`.

    Raises:
      subprocess.CalledProcessError: the command failed.
    """
    environment = _environment()
    # Most variants, and all their evaluations, run the same programs; a cache compiles them once.
    environment.setdefault(_CACHE, str(run_dir.parent / _PROGRAMS))
    environment.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    subprocess.run([sys.executable, *command], check=True, env=environment)


def _run_for(seconds: float, *command: str, run_dir: Path) -> None:
    """Runs `python COMMAND` until it ends, or stops it once it has trained for so long.

    Raises:
      subprocess.CalledProcessError: the command failed.
    """
    if _trained_for(run_dir) >= seconds:
        return
    environment = _environment() | {"JAX_ENABLE_COMPILATION_CACHE": "false"}
    with subprocess.Popen([sys.executable, *command], env=environment) as process:
        while process.poll() is None:
            if _trained_for(run_dir) >= seconds:
                process.terminate()  # train.py then saves and ends with status 0
                process.wait()
            else:
                time.sleep(0.5)
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)


def _trained_for(run_dir: Path) -> float:
    """The seconds that a run counts in its metrics, pauses included; 0 before its first record."""
    records = metrics.read(RunPaths(run_dir).metrics)
    return records[-1]["seconds"] if records else 0.0


def _environment() -> dict[str, str]:
    return {k: v for k, v in os.environ.items() if k != _PREALLOCATE}

"""Writes the records of benchmarks, JSON files under benchmarks/results. Do not edit them by hand.

`python -m benchmarks.render` makes pages of them.
"""

import argparse
import importlib.metadata
import itertools
import json
import os
import subprocess
import sys
import traceback
from collections.abc import Iterable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import numpy as np

from benchmarks import kernels

RESULTS = Path(__file__).parent / "results"


def relative_error(out: jax.Array, reference: jax.Array) -> float:
    """||out - reference|| / ||reference|| in float64."""
    out, reference = (np.asarray(a.astype("float32"), np.float64) for a in (out, reference))
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def write(benchmark: str, rows: list[dict[str, Any]], path: Path, **details: Any) -> None:
    """Writes measured rows with the device, versions, commit, command and any JSON `details`.

    "kernels" says which version of the kernels was measured, also where the commit is unknown.
    """
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "tokamax", "torch", "transformers")
    content = {
        "benchmark": benchmark,
        "device": device(),
        "date": date.today().isoformat(),
        "commit": commit(),
        "kernels": kernels.of_today(),
        "versions": {name: v for name in packages if (v := _version(name))},
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        **details,
        "rows": rows,
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")


def parser(description: str | None) -> argparse.ArgumentParser:
    """Of a benchmark's command line; it has `--out`, the directory of the record."""
    made = argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    made.add_argument("--out", type=Path, default=RESULTS)
    return made


def command(benchmark: str, description: str, rows: Iterable[dict[str, Any]]) -> None:
    """The command of a benchmark without options but `--out`: measures the rows and writes them."""
    args = parser(description.split("\n")[0]).parse_args()
    write_as_they_come(benchmark, rows, args.out)


def force(back_end: str | None, benchmark: str) -> str:
    """Has blocks use a back end, if one is named; returns the name of the benchmark's record."""
    if back_end is None:
        return benchmark
    os.environ["TWELL_JAX_BACK_END"] = back_end
    return f"{benchmark}-{back_end.lower()}"


def write_as_they_come(
    benchmark: str, rows: Iterable[dict[str, Any]], directory: Path, name: str | None = None
) -> None:
    """Writes and prints each row once it is measured, so that an interrupted run keeps its rows.

    The record has a `name` if it is not the benchmark's.
    """
    measured, path = [], new_path(name or benchmark, directory)
    for row in rows:
        measured.append(row)
        write(benchmark, measured, path)
        print(line(row), flush=True)
    print(path)


def new_path(benchmark: str, directory: Path) -> Path:
    """The path for a new record; existing records are not overwritten.

    Warns if nobody could tell what was measured.
    """
    if (measured := commit()) is None or measured.endswith("-dirty"):
        print(f"warning: the record will name the commit {measured}; commit, or set COMMIT")
    today = path_of_today(benchmark, directory)
    others = (today.with_stem(f"{today.stem}-{n}") for n in itertools.count(2))
    return next(path for path in itertools.chain([today], others) if not path.exists())


def path_of_today(benchmark: str, directory: Path) -> Path:
    """The path of today's first record on this device."""
    slug = device().lower().replace(" ", "-")
    return directory / f"{benchmark}-{slug}-{date.today():%Y%m%d}.json"


def device() -> str:
    """The name of the device that is measured."""
    return jax.devices()[0].device_kind


def line(row: dict[str, Any]) -> str:
    """A row as one line for the terminal."""
    return "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if name not in ("direction", "dtype", "baseline", "baseline_ms")
    )


def failure(problem: Exception) -> str:
    """An exception as one line for a row; also prints its traceback to stderr."""
    traceback.print_exception(problem)
    return f"{type(problem).__name__}: {str(problem).strip()}".splitlines()[0][:200]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str | None:
    """The commit that is measured, as `git describe` names it."""
    if named := os.environ.get("COMMIT"):  # for copies without git history
        return named
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

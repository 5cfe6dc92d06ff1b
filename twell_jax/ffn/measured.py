"""What was measured on this machine: how long each algorithm takes for a block.

`python -m twell_jax.measure` keeps it, in a file for each card. `dispatch.select` prefers it to the
records of the cards that its rules were made on.
"""

import functools
import json
import math
import os
import warnings
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import jax

from twell_jax import untrusted, user_cache
from twell_jax.ffn.algorithms import ALGORITHMS

type Times = Mapping[int, Mapping[str, float]]  # milliseconds, by tokens and by how

FORMAT = 2  # of the file
_MOST_BYTES = 2**24  # of the file
_MOST_TOKENS = 2**62
_GRADIENTS = "dense", "sparse"
_DAMAGED = ValueError, TypeError, KeyError, AttributeError, OverflowError, RecursionError


@dataclass(frozen=True)
class Block:
    """What decides how long a block takes, besides its tokens and their pattern.

    Attributes:
      width, neurons: D and H.
      gated: whether there is a gate projection.
      dtype: of x and of the weights.
    """

    width: int
    neurons: int
    gated: bool
    dtype: str


@dataclass(frozen=True)
class Measured:
    """What was measured of a block.

    Attributes:
      path: of the file.
      forward: of the block, for each algorithm.
      both: of forward and backward, with "dense" and with "sparse" gradients; may be empty.
    """

    path: Path
    forward: Times
    both: Times

    def fastest(self, tokens: int) -> str:
        """The fastest algorithm for that number of tokens that is nearest, as a ratio."""
        return _fastest(self.forward, tokens)

    def fastest_gradients(self, tokens: int) -> str | None:
        """Likewise, "dense" or "sparse"; None if they were not measured."""
        return _fastest(self.both, tokens) if self.both else None


def _fastest(times: Times, tokens: int) -> str:
    nearest = times[min(times, key=lambda count: abs(math.log(count / tokens)))]
    return min(nearest, key=nearest.__getitem__)


def of(device: str, block: Block) -> Measured | None:
    """What was measured of a block on a card, by these versions; None if nothing was.

    A file that cannot be read, or is of other versions, is set aside with a warning.
    """
    try:
        path = file_of(device)
        changed = path.stat().st_mtime_ns
    except OSError:
        return None
    found = _read(path, changed).get(block)
    return None if found is None else Measured(path, *found)


def keep(device: str, block: Block, forward: Times, both: Times) -> Path:
    """Adds a block to the file of a card, or replaces what that has of it; returns the file."""
    path = file_of(device)
    known: dict[Block, tuple[Times, Times]] = {}
    if path.exists():
        known = dict(_read(path, path.stat().st_mtime_ns))
    known[block] = forward, both
    content = {
        "format": FORMAT,
        "device": device,
        "versions": versions(),
        "blocks": [
            asdict(block) | {"forward": forward, "both": both}
            for block, (forward, both) in known.items()
        ],
    }
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.write_text(json.dumps(content, indent=1) + "\n")
    temporary.replace(path)
    return path


def file_of(device: str) -> Path:
    """The file of a card.

    Raises:
      FileNotFoundError: see `user_cache.directory`.
    """
    name = "".join(c if c.isalnum() else "-" for c in device.lower())
    return user_cache.directory() / f"measured-{name}.json"


def versions() -> dict[str, str]:
    """Those of what decides the times."""
    try:
        ours = version("twell-jax")
    except PackageNotFoundError:  # not installed
        ours = ""
    return {"jax": jax.__version__, "twell-jax": ours}


@functools.lru_cache(maxsize=8)
def _read(path: Path, changed: int) -> Mapping[Block, tuple[Times, Times]]:
    """What a file has of each block; `changed` is when it was written."""
    try:
        content = json.loads(untrusted.read(path, _MOST_BYTES))
        if (content["format"], content["versions"]) != (FORMAT, versions()):
            _set_aside(path, "it is of other versions")
            return {}
        return dict(_block(entry) for entry in content["blocks"])
    except (OSError, *_DAMAGED) as problem:
        _set_aside(path, f"it cannot be read ({type(problem).__name__})")
        return {}


def _block(entry: dict[str, Any]) -> tuple[Block, tuple[Times, Times]]:
    """A block of a file, and its times.

    Raises:
      One of `_DAMAGED`: the entry is damaged, or has an algorithm that is not known.
    """
    forward = _times(entry.pop("forward"), ALGORITHMS)
    if not forward:
        raise ValueError("no times")
    both = _times(entry.pop("both"), _GRADIENTS)
    return Block(**entry), (forward, both)


def _times(found: Any, known: Collection[str]) -> Times:
    """Times of a file, of what is known.

    Raises:
      One of `_DAMAGED`.
    """
    milliseconds = {
        int(tokens): {str(name): float(ms) for name, ms in times.items()}
        for tokens, times in found.items()
    }
    for tokens, times in milliseconds.items():
        if not 1 <= tokens <= _MOST_TOKENS:
            raise ValueError(f"no number of tokens: {tokens}")
        if not times or not times.keys() <= {*known}:
            raise ValueError(f"not all known: {[*times]}")
        if not all(0 < ms < math.inf for ms in times.values()):
            raise ValueError(f"no times: {times}")
    return milliseconds


def _set_aside(path: Path, why: str) -> None:
    aside = path.with_suffix(".aside")
    try:
        path.replace(aside)
        where = f"set aside as {aside.name}"
    except OSError:  # a directory that we may not write
        where = "not used"
    warnings.warn(
        f"{path}: {why}; {where}. Measure again: python -m twell_jax.measure", stacklevel=2
    )

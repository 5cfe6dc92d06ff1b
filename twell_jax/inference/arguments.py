"""Types and help texts that arguments of several commands share."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

DIRECTORY = "of a run, such as runs/tiny, or with a config.json; or org/name[@revision] on the hub"


def at_least(minimum: int) -> Callable[[str], int]:
    """The `type` of an argument that is an integer of at least `minimum`."""

    def integer(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"must be an integer, got {text!r}") from None
        if value < minimum:
            raise argparse.ArgumentTypeError(f"must be at least {minimum}, got {value}")
        return value

    return integer


def path(text: str) -> Path:
    """The `type` of an argument that is a path, where "~" is the home directory."""
    return Path(os.path.expanduser(text))

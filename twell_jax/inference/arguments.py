"""Types of command-line arguments."""

import argparse
from collections.abc import Callable


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

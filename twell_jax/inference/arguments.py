"""Types and help texts that arguments of several commands share."""

import argparse
import os
from collections.abc import Callable
from pathlib import Path

from twell_jax.config import ConfigError

DIRECTORY = "of a run, such as runs/tiny, or with a config.json; or org/name[@revision] on the hub"


def command_line(description: str | None, epilog: str | None = None) -> argparse.ArgumentParser:
    """The parser of a command, whose help keeps the lines of both texts."""
    return argparse.ArgumentParser(
        description=description,
        epilog=epilog,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


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


def add_tasks(parser: argparse.ArgumentParser, default: str | None, what: str) -> None:
    """Adds `--tasks`, `--task-path` and `--limit`; `what` says what is scored by default."""
    parser.add_argument("--tasks", default=default, help=f"of the harness (default: {what})")
    parser.add_argument("--task-path", type=path, help="directory of further task definitions")
    parser.add_argument("--limit", type=at_least(1), help="questions of each task (default: all)")


def check_out(parser: argparse.ArgumentParser, out: Path | None) -> None:
    """Ends the process with a line if `--out` cannot be a file."""
    if out and not out.parent.is_dir():
        parser.error(f"--out: there is no directory {out.parent}")
    if out and out.is_dir():
        parser.error(f"--out: {out} is a directory")


def check_task_path(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    """Ends the process with a line if `--task-path` is no directory."""
    if args.task_path and not args.task_path.is_dir():
        parser.error(f"--task-path: there is no directory {args.task_path}")


def words_of(text: Path) -> str:
    """What the file of `--text` holds.

    Raises:
      ConfigError: it is empty or not UTF-8.
      OSError: it cannot be read.
    """
    try:
        words = text.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text: {text} is not UTF-8 text (at byte {error.start})") from None
    if not words:
        raise ConfigError(f"--text: {text} is empty")
    return words


def unicode_text(text: str) -> str:
    """The `type` of an argument that is text; what is not UTF-8 comes as half surrogate pairs."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise argparse.ArgumentTypeError("is not UTF-8 text") from None
    return text


def path(text: str) -> Path:
    """The `type` of an argument that is a path, where "~" is the home directory."""
    return Path(os.path.expanduser(text))

"""Says which version of the kernels a record measured, and how many versions ago that was.

`benchmarks/kernels.txt` has a line for each version of the files of pallas_kernels, but for those
of reference/: its digest, its date, and the commits of records that measured it and do not hold the
digest themselves. `benchmarks.render` adds the version of today.
"""

import hashlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

KERNELS = Path(__file__).parents[1] / "pallas_kernels"
VERSIONS = Path(__file__).with_name("kernels.txt")


@dataclass(frozen=True)
class Version:
    """A line of kernels.txt.

    Attributes:
      digest: 12 hexadecimal digits of `digest`.
      day: when the version came, as YYYY-MM-DD.
      commits: the first 7 digits of the commits of old records that measured it.
    """

    digest: str
    day: str
    commits: tuple[str, ...] = ()

    def __str__(self) -> str:
        return " ".join((self.digest, self.day, *self.commits))


def digest(files: Mapping[str, bytes]) -> str:
    """What stands for files of kernels: their names and contents."""
    hashed = hashlib.sha256()
    for name, content in sorted(files.items()):
        hashed.update(f"{name} {len(content)}\n".encode() + content)
    return hashed.hexdigest()[:12]


def of_today() -> str:
    """The digest of the kernels that are here."""
    names = [path.relative_to(KERNELS) for path in KERNELS.rglob("*.py")]
    return digest(
        {
            name.as_posix(): (KERNELS / name).read_bytes()
            for name in names
            if name.parts[0] != "reference"
        }
    )


def versions() -> list[Version]:
    """The versions of kernels.txt, the newest last."""
    lines = [line.split() for line in VERSIONS.read_text().splitlines()]
    return [Version(found, day, tuple(commits)) for found, day, *commits in lines]


def with_today(known: list[Version]) -> list[Version]:
    """The versions, with that of today as the last one."""
    today = of_today()
    if known and known[-1].digest == today:
        return known
    return [*known, Version(today, date.today().isoformat())]


def write(known: Iterable[Version]) -> None:
    """Writes kernels.txt."""
    VERSIONS.write_text("".join(f"{version}\n" for version in known))


def age(record: Mapping[str, Any], known: list[Version]) -> int | None:
    """How many versions ago the kernels were those that a record measured: 0 for the last one.

    None if no version is known to be them: it is not in the list, or the record's commit names a
    tree with changes ("-dirty").
    """
    commit = record["commit"] or ""
    for back, version in enumerate(reversed(known)):
        if "kernels" in record:
            is_measured = version.digest == record["kernels"]
        else:
            is_measured = commit[:7] in version.commits and not commit.endswith("-dirty")
        if is_measured:
            return back
    return None

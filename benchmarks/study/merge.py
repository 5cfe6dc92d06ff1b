"""Puts records of the study together: python -m benchmarks.study.merge RECORD ... --out FILE

All must have been measured on one kind of device, with the same settings and text. A run that
several records have is taken from the last of them. FILE has the other details of the first.
"""

import argparse
import json
import sys
from pathlib import Path
from typing import Any

from benchmarks import variants
from benchmarks.study.runs import by_run
from twell_jax.config import ConfigError


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("records", nargs="+", type=Path, metavar="RECORD")
    parser.add_argument("--out", type=Path, required=True, metavar="FILE")
    args = parser.parse_args()
    try:
        args.out.write_text(json.dumps(merged(args.records), indent=1) + "\n")
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


def merged(paths: list[Path]) -> dict[str, Any]:
    """The content of the record that has the rows of all records.

    Raises:
      ConfigError: they differ in the device, a setting or the text.
      OSError: one of them cannot be read.
    """
    first = json.loads(paths[0].read_text())
    device, base = first["device"], first["base"]
    rows = [row for path in paths for row in variants.rows_of(path, device, base, base)]
    return first | {"rows": list(by_run(rows, rows[0].get("text", "")).values())}


if __name__ == "__main__":
    main()

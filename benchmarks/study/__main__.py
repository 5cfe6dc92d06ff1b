"""What L1 does to a language model, and what the kernels make of it: docs/study.md.

    python -m benchmarks.study [key=value ...] [--only NAME ...] [--resume FILE] [--out DIRECTORY]

Trains and analyses variants of base.yaml, one after the other, by the commands that a user has. The
record of the day in DIRECTORY starts with the rows of FILE, a record of another day. A variant that
the record has already is skipped, an interrupted one continues. Overrides hold for all variants,
for example data.source=files and data.paths=[...] for a text of your own.
"""

import argparse
import json
import sys
from datetime import date
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record, variants
from twell_jax.config import ConfigError
from twell_jax.train.run_directory import RunPaths

BASE = Path(__file__).parent / "base.yaml"

ONE_L1 = "l1_coefficient=3.0e-4"
VARIANTS = {
    "silu": ["model.activation=silu"],
    "relu": [],
    **{f"l1 {c}": [f"l1_coefficient={c}"] for c in ("1.0e-5", "3.0e-5", "1.0e-4", "1.0e-3")},
    "l1 3.0e-4": [ONE_L1],
    "l1 3.0e-4, warm-up": [ONE_L1, "l1_warmup=[100, 500]"],
    "l1 3.0e-4, re-initialised": [ONE_L1, "reinit_every=100"],
    # as many parameters as the gated block of d_ff 2816
    "l1 3.0e-4, not gated": [ONE_L1, "model.gated=false", "model.d_ff=4224"],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--resume", type=Path, metavar="FILE", help="record to continue")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_intermixed_args()
    variants.leave_memory()
    today = record.path_of_today("study", args.out)
    try:
        base, defaults = (variants.settings(BASE, given) for given in (args.overrides, []))
        rows = variants.rows_so_far(today, args.resume, base, defaults)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    for name in args.only:
        if name not in rows:
            rows[name] = measure(name, args.overrides)
            record.write("study", list(rows.values()), today, base=base)
            print(today, flush=True)


def measure(name: str, overrides: list[str]) -> dict[str, Any]:
    """Trains a variant to its end and analyses it."""
    run_dir, settings = variants.train(BASE, overrides, name, VARIANTS[name])
    variants.run("-m", "twell_jax.analyze", str(run_dir), run_dir=run_dir)
    analysis = json.loads(RunPaths(run_dir).analysis.read_text())
    when = {"date": date.today().isoformat(), "commit": record.commit()}
    return {"variant": name, **when, "settings": settings, **over_position_ranges(analysis)}


def over_position_ranges(analysis: dict[str, Any]) -> dict[str, Any]:
    """Averages nnz_by_position over positions 0, 1, 2-3, 4-7, ...; `positions` has the ranges."""
    by_position = np.array(analysis["nnz_by_position"])
    length = by_position.shape[1]
    starts = [0, *(2**i for i in range((length - 1).bit_length()))]
    stops = [*starts[1:], length]
    means = np.add.reduceat(by_position, starts, axis=1) / np.subtract(stops, starts)
    positions = {"positions": list(zip(starts, stops, strict=True))}
    return analysis | positions | {"nnz_by_position": means.tolist()}


if __name__ == "__main__":
    main()

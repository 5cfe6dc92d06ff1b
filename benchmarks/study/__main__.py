"""What sparsity costs a language model, and what the kernels make of it: docs/study.md.

    python -m benchmarks.study [key=value ...] [--only NAME ...] [--seeds N ...] [--minutes N]
        [--resume RECORD] ... [--out DIRECTORY]

Trains variants of base.yaml by train.py, each from several seeds, and measures each run as soon as
it has ended; then its checkpoint is removed. The record of the day in DIRECTORY is written after
each run, and starts with the rows of RECORD, of another day or several (benchmarks.study.merge). A
run whose row is there is skipped. With --minutes no run is started that would end later, if it
took as long as the one before. Overrides hold for all runs, for example data.source=files and
data.paths=[...] for a text of your own. Several GPUs take a process each, with a DIRECTORY of its
own: set CUDA_VISIBLE_DEVICES, and divide the variants or the seeds among them.
"""

import argparse
import math
import shutil
import subprocess
import sys
import time
from datetime import date
from pathlib import Path
from typing import Any

from benchmarks import record, variants
from benchmarks.study import measure
from benchmarks.study.runs import FOR_ALL, SEEDS, VARIANTS, Variant, by_run, in_order
from twell_jax import config as config_lib
from twell_jax import data
from twell_jax.config import ConfigError
from twell_jax.train.checkpoint_errors import CheckpointError
from twell_jax.train.run_directory import RunPaths

BASE = Path(__file__).parent / "base.yaml"


def main() -> None:
    begin = time.monotonic()
    args = arguments()
    variants.leave_memory()
    today = record.path_of_today("study", args.out)
    overrides = [*FOR_ALL, *args.overrides]
    try:
        require_no_seed(overrides)
        for name in args.only:
            config_lib.load(BASE, [*overrides, *VARIANTS[name].settings])
        base, defaults = (variants.settings(BASE, given) for given in (overrides, FOR_ALL))
        found = variants.rows_so_far(today, args.resume, base, defaults)
        config = config_lib.load(BASE, overrides)
        text = data.load(config).fingerprint
        rows = by_run(found, text)
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")
    variants.share_programs(config.run_dir)
    seconds, failed = 0.0, []
    for variant, seed in in_order(args.only, args.seeds):
        if (variant.name, seed) in rows:
            continue
        begin_of_run = time.monotonic()
        if begin_of_run + seconds > begin + 60 * args.minutes:
            print(f"no time is left for {variant.name}, seed {seed}, and what follows")
            break
        try:
            row = measured(variant, seed, overrides)
        except subprocess.CalledProcessError:  # it has said why; the other runs may do
            failed.append(f"{variant.name}, seed {seed}")
            continue
        except (CheckpointError, ConfigError) as error:
            failed.append(f"{variant.name}, seed {seed} ({error})")
            continue
        seconds = time.monotonic() - begin_of_run
        rows[variant.name, seed] = row | {"text": text, "seconds": seconds}
        record.write("study", list(rows.values()), today, base=base)
        print(today, flush=True)
    if failed:
        sys.exit(f"error: not measured: {'; '.join(failed)}")


def arguments() -> argparse.Namespace:
    """The command line."""
    parser = record.parser(__doc__)
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", default=SEEDS)
    parser.add_argument("--minutes", type=float, default=math.inf, metavar="N")
    parser.add_argument(
        "--resume", type=Path, action="append", default=[], metavar="RECORD", help="to continue"
    )
    return parser.parse_intermixed_args()


def require_no_seed(overrides: list[str]) -> None:
    """Raises ConfigError if an override sets the seed, which every run has its own of."""
    if any(override.startswith("seed=") for override in overrides):
        raise ConfigError("seed: every run has its own; write --seeds N ... instead")


def measured(variant: Variant, seed: int, overrides: list[str]) -> dict[str, Any]:
    """Trains a run to its end, measures it and removes its checkpoint."""
    name = f"{variant.name} seed {seed}"
    changes = [*variant.settings, f"seed={seed}"]
    run_dir, settings = variants.train(BASE, overrides, name, changes)
    found = measure.measured(run_dir)
    shutil.rmtree(RunPaths(run_dir).checkpoints)
    return {
        **{"variant": variant.name, "method": variant.method, "seed": seed},
        **{"date": date.today().isoformat(), "commit": record.commit(), "settings": settings},
        **found,
    }


if __name__ == "__main__":
    main()

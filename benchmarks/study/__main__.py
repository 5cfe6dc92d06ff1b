"""What L1 does to a language model, and what the kernels make of it: docs/study.md.

    python -m benchmarks.study [--only NAME ...] [--out DIRECTORY] [key=value ...]

Trains and analyses variants of base.yaml, one after the other, by the commands that a user has. A
variant that the record of the day has already is left out, an interrupted one continues. Overrides
count for all of them: on a machine with more source, data.source=files and data.paths=[...].
"""

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

from benchmarks import record
from twell_jax import config as config_lib
from twell_jax.run import RunPaths

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
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_intermixed_args()
    # This process asks for the device's name alone and must leave its memory to the others.
    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    rows = record.rows_of_today("study", args.out)
    done = {row["variant"] for row in rows}
    for name in args.only:
        if name not in done:
            rows.append(measure(name, args.overrides))
            print(record.write("study", rows, args.out), flush=True)


def measure(name: str, overrides: list[str]) -> dict[str, Any]:
    """Trains a variant to its end and analyses it."""
    config = config_lib.load(BASE, overrides)
    run_dir = Path(config.run_dir) / name.replace(", ", "-").replace(" ", "-")
    settings = [*overrides, *VARIANTS[name], f"run_dir={run_dir}"]
    environment = {k: v for k, v in os.environ.items() if k != "XLA_PYTHON_CLIENT_PREALLOCATE"}
    environment.setdefault("JAX_COMPILATION_CACHE_DIR", str(Path(config.run_dir) / "compiled"))
    for command in (["train.py", str(BASE), *settings], ["-m", "twell_jax.analyze", str(run_dir)]):
        subprocess.run([sys.executable, *command], check=True, env=environment)
    analysis = json.loads(RunPaths(run_dir).analysis.read_text())
    return {"variant": name, "settings": settings, **analysis}


if __name__ == "__main__":
    main()

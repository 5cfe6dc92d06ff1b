"""L1 against the tile lasso: what a share of neurons that 256 tokens use between them costs.

    python -m benchmarks.lasso [CONFIG [key=value ...]] [--out DIRECTORY]
    python -m benchmarks.render DIRECTORY/lasso-....json

Trains variants of CONFIG (default: configs/tiny.yaml) on the same data from the same seed, and
analyses them, by the commands that a user has; an interrupted variant continues. Give `seed` to
repeat it: how far two seeds part is the measure for the differences.
"""

import json
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record, variants
from twell_jax import config as config_lib
from twell_jax.train.run_directory import RunPaths

BASE = Path(__file__).parents[1] / "configs" / "tiny.yaml"
STRENGTHS = {"l1": ("1.5e-3", "4.0e-3", "1.5e-2"), "lasso": ("5.0e-4", "1.5e-3", "5.0e-3")}
VARIANTS = {
    f"{penalty} {strength}": [f"l1_coefficient={strength}", f"lasso_share={penalty == 'lasso':d}"]
    for penalty, strengths in STRENGTHS.items()
    for strength in strengths
}


def main() -> None:
    args = variants.parser(__doc__, BASE).parse_intermixed_args()
    variants.leave_memory()
    path = record.new_path("lasso", args.out)
    seed = config_lib.load(args.config, args.overrides).seed
    rows: list[dict[str, Any]] = []
    for name, changes in VARIANTS.items():
        run_dir, settings = variants.train(args.config, args.overrides, name, changes)
        variants.run("-m", "twell_jax.analyze", str(run_dir), run_dir=run_dir)
        analysis = json.loads(RunPaths(run_dir).analysis.read_text())
        rows.append({"variant": name, "settings": settings, **summarise(analysis)})
        record.write("lasso", rows, path, seed=seed)
        print(record.line(rows[-1]), flush=True)
    print(path)


def summarise(analysis: dict[str, Any]) -> dict[str, Any]:
    """CE, and means over layers: non-zeros, share of dead neurons, share that 256 tokens use."""
    return {
        "held_out_ce": analysis["held_out_ce"],
        "nnz_mean": float(np.mean(analysis["nnz_mean"])),
        "dead": float(np.mean(analysis["dead"])) / analysis["d_ff"],
        "union": float(np.mean(analysis["union"]["256"])),
        "union_by_layer": analysis["union"]["256"],
    }


if __name__ == "__main__":
    main()

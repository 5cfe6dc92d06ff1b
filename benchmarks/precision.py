"""What products of 8-bit operands cost: pairs of runs that differ in `model.matmul_dtype` alone.

    python -m benchmarks.precision [CONFIG [key=value ...]] [--seeds 0 1 2] [--out DIRECTORY]

Trains CONFIG (default: precision.yaml) for each seed in both ways, by the command that a user has.
An interrupted run continues, and one that has ended is not repeated. So several processes can
divide the seeds, and a last one with all seeds writes the record.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record, variants
from twell_jax.train import metrics, pace
from twell_jax.train.run_directory import RunPaths

BASE = Path(__file__).with_suffix(".yaml")
VARIANTS = {"bfloat16": [], "float8": ["model.matmul_dtype=float8"]}
SEEDS = [0, 1, 2]


def main() -> None:
    parser = variants.parser(__doc__, BASE)
    parser.add_argument("--seeds", nargs="+", type=int, metavar="N", default=SEEDS)
    args = parser.parse_intermixed_args()
    variants.leave_memory()
    rows, path = [], record.new_path("precision", args.out)
    for seed in args.seeds:
        of_seed = {}
        for name, changes in VARIANTS.items():
            changes = [*changes, f"seed={seed}"]
            directory = f"{name}-{seed}"
            run_dir, settings = variants.train(args.config, args.overrides, directory, changes)
            of_seed[name] = summarise(run_dir)
            of_seed[name] |= compared(of_seed[name], of_seed["bfloat16"])
            rows.append({"variant": name, "seed": seed, "settings": settings, **of_seed[name]})
            record.write("precision", rows, path)
            print(record.line(rows[-1]), flush=True)
    print(path)


def summarise(run_dir: Path) -> dict[str, Any]:
    """What a run came to: cross-entropies, and the sparsity and speed of its last tenth."""
    records = metrics.read(RunPaths(run_dir).metrics)
    steps = [line for line in records if "ce" in line]
    evaluations = [line for line in records if "held_out_ce" in line]
    last = steps[-max(1, len(steps) // 10) :]
    return {
        "steps": steps[-1]["step"],
        "tokens": steps[-1]["tokens"],
        "unigram_ce": evaluations[-1]["unigram_ce"],
        "held_out_ce": evaluations[-1]["held_out_ce"],
        "nnz": float(np.mean([line["nnz"] for line in last])),
        "union": float(np.mean([line["mean_union"] for line in last])),
        "sparse_layers": pace.sparse_layers(steps[-1]),
        "tokens_per_second": float(np.median([line["tokens_per_second"] for line in last])),
        "evaluated": [[line["step"], line["held_out_ce"]] for line in evaluations],
    }


def compared(row: dict[str, Any], baseline: dict[str, Any]) -> dict[str, float]:
    """The increase of the held-out cross-entropy, as a fraction, and nnz over the baseline's."""
    return {
        "increase": row["held_out_ce"] / baseline["held_out_ce"] - 1,
        "nnz_ratio": row["nnz"] / baseline["nnz"],
    }


if __name__ == "__main__":
    main()

"""Whether training with sparse gradients follows dense training: one run, computed in several ways.

    python -m benchmarks.losses [CONFIG [key=value ...]] [--out DIRECTORY]
    python -m benchmarks.render DIRECTORY/losses-....json --out DIRECTORY

Trains variants of CONFIG (default: losses.yaml) on the same data from the same seed, by the command
that a user has; an interrupted variant continues. The variants differ in rounding alone, which
training amplifies: how far two dense runs part is the measure for the others.
"""

from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import record, variants
from twell_jax import config as config_lib
from twell_jax.train import metrics
from twell_jax.train.run_directory import RunPaths, load_config

BASE = Path(__file__).with_name("losses.yaml")
WINDOW = 10  # logged steps over which differences are averaged, so that no single step decides


def main() -> None:
    args = variants.parser(__doc__, BASE).parse_intermixed_args()
    variants.leave_memory()
    rows, path = [], record.new_path("losses", args.out)
    for name, changes in variants_of(config_lib.load(args.config, args.overrides)).items():
        run_dir, settings = variants.train(args.config, args.overrides, name, changes)
        rows.append({"variant": name, "settings": settings, **summarise(run_dir)})
        rows[-1] |= differences(rows[-1]["ce"], rows[0]["ce"])
        record.write("losses", rows, path, window=WINDOW)
    print(path)


def variants_of(config: config_lib.Config) -> dict[str, list[str]]:
    """The overrides of each variant; the others are compared with the first."""
    dense = "model.ffn_implementation=xla"
    return {
        "dense": [dense],
        "dense, other micro-batches": [dense, f"micro_batch={config.micro_batch // 2 or 2}"],
        "sparse gradients": ["model.ffn_gradients=sparse"],
        "chosen by layer": ["sparse_gradients_every=50"],
    }


def summarise(run_dir: Path) -> dict[str, Any]:
    """The metrics of a run's logged steps; `nnz`, `overflow` and `chosen` are by layer.

    `chosen` says which layers should compute sparse gradients; where they overflow, dense gradients
    replace them.
    """
    records = metrics.read(RunPaths(run_dir).metrics)
    steps = [line for line in records if "ce" in line]
    evaluations = [line for line in records if "held_out_ce" in line]
    every_layer = load_config(run_dir).model.ffn_gradients == "sparse"
    by_config = [every_layer] * len(steps[0]["nnz"])
    return {
        "held_out_ce": evaluations[-1]["held_out_ce"],
        **{name: [line[name] for line in steps] for name in ("step", "ce", "nnz", "overflow")},
        "chosen": [line.get("sparse_gradients", by_config) for line in steps],
    }


def differences(ce: list[float], baseline: list[float]) -> dict[str, Any]:
    """The difference of two runs' losses, averaged over `WINDOW` logged steps; mean and maximum."""
    window = np.full(min(WINDOW, len(ce)), 1 / min(WINDOW, len(ce)))
    smooth = np.convolve(np.subtract(ce, baseline), window, mode="valid")
    return {
        "difference": smooth.tolist(),
        "mean_difference": float(np.abs(smooth).mean()),
        "largest_difference": float(np.abs(smooth).max()),
    }


if __name__ == "__main__":
    main()

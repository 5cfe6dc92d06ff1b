"""Shows the last figures of runs side by side: python .ci/compare.py NAME=RUN_DIR NAME=RUN_DIR"""

import statistics
import sys

from twell_jax.config import ConfigError
from twell_jax.train import metrics
from twell_jax.train.run_directory import RunPaths, load_config


def figures(run_dir: str) -> list[str]:
    """Held-out cross-entropy, share of zeros, U, and speed: the median of the run."""
    records = metrics.read(RunPaths(run_dir).metrics)
    losses = [record["held_out_ce"] for record in records if "held_out_ce" in record]
    steps = [record for record in records if "ce" in record]
    if not (losses and steps):
        raise ConfigError(f"{run_dir}: the run has no evaluation yet; train it to its end first")
    nnz = statistics.mean(steps[-1]["nnz"])
    speed = statistics.median(record["tokens_per_second"] for record in steps)
    zeros = 1 - nnz / load_config(run_dir).model.d_ff
    unions = steps[-1].get("mean_union")  # not of few tokens, nor in runs of version 0.2
    union = f"{statistics.mean(unions):.1%}" if unions else "unknown"
    return [f"{losses[-1]:.3f}", f"{zeros:.1%}", union, f"{speed:,.0f}"]


def main() -> None:
    """Prints a line for each figure."""
    runs = [argument.split("=", 1) for argument in sys.argv[1:]]
    names = [name for name, _ in runs]
    whats = "cross-entropy", "zeros", "U", "speed"
    units = (
        "held-out, nats/token",
        "of the hidden activations",
        "of the neurons, for any of 256 tokens",
        "tokens/s, in training",
    )
    try:
        columns = [figures(run_dir) for _, run_dir in runs]
    except ConfigError as error:
        sys.exit(f"error: {error}")
    for what, unit, values in zip(whats, units, zip(*columns, strict=True), strict=True):
        cells = [f"{name} {value:<10}" for name, value in zip(names, values, strict=True)]
        print(f"{what:<15}", *cells, unit)


if __name__ == "__main__":
    main()

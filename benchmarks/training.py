"""Whole training steps of a shipped configuration, on random tokens: sparse and dense twin.

python -m benchmarks.training [configs/0p5b.yaml] [key=value ...] [--out DIRECTORY]
"""

import argparse
from pathlib import Path

import jax
import numpy as np

from benchmarks import record
from twell_jax import config as config_lib
from twell_jax import sharding, timing
from twell_jax.training import make_trainer

VARIANTS = {  # by implementation; the first is the baseline
    "xla, silu": ["model.activation=silu", "l1_coefficient=0"],
    "xla, relu": ["model.ffn_implementation=xla"],
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("config", nargs="?", default="configs/0p5b.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = []
    for name, overrides in VARIANTS.items():
        config = config_lib.load(args.config, [*overrides, *args.overrides])
        row = {"config": Path(args.config).stem, "implementation": name} | measure(config)
        rows.append(row)
        path = record.write("training", rows, args.out)
        print(record.line(row), flush=True)
    print(path)


def measure(config: config_lib.Config) -> dict:
    """Tokens per second, peak memory of the compiled step, and what the last step measured."""
    mesh = sharding.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    trainer = make_trainer(config, document_end=0, mesh=mesh)
    shape = (config.batch_sequences, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(0, config.model.vocab_size, shape, dtype=np.int32)
    batch = trainer.put_batch(tokens)
    compiled = trainer.step.lower(trainer.abstract_state, trainer.abstract_batch, 0.0).compile()
    state = trainer.init()

    def step():
        nonlocal state
        state, metrics = compiled(state, batch, config.l1_coefficient)
        return metrics

    ms = timing.milliseconds(step, calls=1)
    return {
        "devices": mesh.size,
        "micro_batch": config.micro_batch,
        "batch_tokens": config.batch_tokens,
        "nnz_mean": float(step().nnz.mean()),
        "ms": ms,
        "tokens_per_second": config.batch_tokens / ms * 1e3,
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
    }


if __name__ == "__main__":
    main()

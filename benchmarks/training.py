"""Whole training steps of a shipped configuration: sparse and dense twins.

    python -m benchmarks.training [configs/0p5b.yaml] [key=value ...] [--out DIRECTORY]

Weights are random, with gates that fire as in benchmarks.inference, and hold that pattern: the
learning rate is 0. "sparse" has sparse gradients in every layer in which they do not overflow.
"""

import argparse
import dataclasses
from pathlib import Path

import jax
import numpy as np

from benchmarks import inference, record
from twell_jax import config as config_lib
from twell_jax import sharding, timing
from twell_jax.training import Trainer, make_trainer

VARIANTS = {  # the first is the baseline
    "xla, silu": ["model.activation=silu", "l1_coefficient=0"],
    "xla, relu": [],
    "sparse, relu": [],
}


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="configs/0p5b.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    name, rows = Path(args.config).stem, []
    for variant, overrides in VARIANTS.items():
        fixed = ["model.ffn_implementation=xla", "optimizer.lr=1e-30"]
        config = config_lib.load(args.config, [*fixed, *overrides, *args.overrides])
        row = {"config": name, "implementation": variant}
        try:
            row |= measure(config, inference.NNZ[name], sparse=variant.startswith("sparse"))
        except jax.errors.JaxRuntimeError as problem:  # out of memory: the others may fit
            row["failed"] = record.first_line(problem)
        rows.append(row)
        path = record.write("training", rows, args.out)
        print(record.line(row), flush=True)
    print(path)


def measure(config: config_lib.Config, nnz: float, *, sparse: bool) -> dict:
    """Tokens per second, peak memory of the compiled step, and what the last step measured.

    Layers fire `nnz` neurons for a token on average, and the first token of a sequence most.
    """
    mesh = sharding.make_mesh(config.mesh)
    jax.set_mesh(mesh)
    trainer = make_trainer(config, document_end=0, mesh=mesh)
    shape = (config.batch_sequences, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(1, config.model.vocab_size, shape, dtype=np.int32)
    tokens[:, 0] = 0
    batch = trainer.put_batch(tokens)
    params = inference.with_pattern(
        config.model, inference.profile(config.model.layers, nnz), jax.random.key(0)
    )
    params = jax.device_put(
        params, jax.tree.map(lambda a: a.sharding, trainer.abstract_state.params)
    )
    state = dataclasses.replace(trainer.init(), params=params)
    chosen = (sparse,) * config.model.layers
    while True:
        compiled = compile_step(trainer, chosen)
        state, metrics = compiled(state, batch, config.l1_coefficient)
        fits = metrics.overflow == 0
        if fits.all():
            break
        chosen = tuple(bool(c and f) for c, f in zip(chosen, fits, strict=True))

    def step():
        nonlocal state
        state, metrics = compiled(state, batch, config.l1_coefficient)
        return metrics

    ms = timing.milliseconds(step, calls=1)
    return {
        "devices": mesh.size,
        "micro_batch": config.micro_batch,
        "batch_tokens": config.batch_tokens,
        "nnz_by_layer": np.asarray(metrics.nnz, np.float64).round(1).tolist(),
        "sparse_layers": sum(chosen),
        "ce": float(metrics.ce),
        "grad_norm": float(metrics.grad_norm),
        "ms": ms,
        "tokens_per_second": config.batch_tokens / ms * 1e3,
        "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
    }


def compile_step(trainer: Trainer, sparse: tuple[bool, ...]):
    step = trainer.step_with(sparse)
    return step.lower(trainer.abstract_state, trainer.abstract_batch, 0.0).compile()


if __name__ == "__main__":
    main()

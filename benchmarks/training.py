"""Whole training steps of a shipped configuration, on one device and on several.

    python -m benchmarks.training [configs/0p5b.yaml] [key=value ...] [--devices 1 2 4]
        [--only "xla, relu"] [--out DIRECTORY]

Weights are random, with gates that fire as in benchmarks.inference, and hold that pattern: the
learning rate is 0. "sparse" has sparse gradients in every layer in which they do not overflow.

Every number of devices is measured as data parallel and as FSDP over all of them. Each device has
the work of one: `batch_tokens` is that of a device, one micro-batch unless it is given, so that
efficiency is tokens per second and device against the row of the same block on one device.
"""

import argparse
import dataclasses
import gc
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import jax
import numpy as np
from flax import nnx

from benchmarks import collectives, inference, record
from twell_jax import config as config_lib
from twell_jax.config import Config
from twell_jax.models import sharding
from twell_jax.train import roofline as estimate
from twell_jax.train.trainer import StepMetrics, Trainer, make_trainer

VARIANTS = {
    "xla, silu": ["model.activation=silu", "l1_coefficient=0"],
    "xla, relu": [],
    "sparse, relu": [],
}
MOST_CALLS, REPEAT_MS, REPEATS = 5, 1000, 5


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("config", nargs="?", default="configs/0p5b.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--devices", type=int, nargs="+", help="how many (default: all there are)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_intermixed_args()
    if (name := Path(args.config).stem) not in inference.NNZ:
        parser.error(f"config: must be of {', '.join(inference.NNZ)}, got {name}")
    available = len(jax.devices())
    devices = sorted(args.devices or [available])
    if not 0 < devices[0] <= devices[-1] <= available:
        parser.error(f"--devices: there are {available}, got {devices}")
    meshes = [(count, fsdp) for count in devices for fsdp in sorted({1, count})]

    path = record.new_path("training", args.out)
    rows, params, one_device = [], None, {}
    for variant in args.only:
        sparse = None
        for count, fsdp in meshes:
            config = configure(args.config, variant, count, fsdp, args.overrides)
            if params is None:
                params = draw_params(config, inference.NNZ[name])
            if sparse is None:
                sparse = (variant.startswith("sparse"),) * config.model.layers
            row = {"config": name, "implementation": variant, "devices": count, "fsdp": fsdp}
            rows.append(row)
            try:
                sparse = measure(row, config, params, sparse)
            except Exception as problem:  # such as out of memory: the other rows may fit
                row["failed"] = record.failure(problem)
            gc.collect()  # the next row needs the memory of this one's state
            if speed := row.get("tokens_per_second"):
                one_device |= {variant: speed} if count == 1 else {}
                if variant in one_device:
                    row["efficiency"] = speed / count / one_device[variant]
            record.write("training", rows, path)
            print(record.line(row), flush=True)
    print(path)


def configure(path: str, variant: str, devices: int, fsdp: int, overrides: list[str]) -> Config:
    """The configuration of a row."""
    fixed = ["model.ffn_implementation=xla", "optimizer.lr=1e-30"]
    config = config_lib.load(path, [*fixed, *VARIANTS[variant], *overrides, f"mesh.fsdp={fsdp}"])
    of_a_device = config.micro_batch * config.model.context
    if any(override.startswith("batch_tokens=") for override in overrides):
        of_a_device = config.batch_tokens
    return config.model_copy(update={"batch_tokens": devices * of_a_device})


def draw_params(config: Config, nnz: float) -> nnx.State:
    """Parameters on the host whose layers fire `nnz` neurons for a token on average."""
    spread = inference.profile(config.model.layers, nnz)
    return jax.device_get(inference.with_pattern(config.model, spread, jax.random.key(0)))


def measure(
    row: dict, config: Config, params: nnx.State, sparse: tuple[bool, ...]
) -> tuple[bool, ...]:
    """Adds to `row`, one after the other, what the steps measured, their speed and a profile.

    The first token of a sequence fires most neurons. Returns which of the layers whose gradients
    were to be sparse had room for that.
    """
    mesh = sharding.make_mesh(config.mesh, jax.devices()[: row["devices"]])
    with jax.set_mesh(mesh):
        trainer = make_trainer(config, document_end=0, mesh=mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.abstract_state.params)
        # The first parameters leave before the others come, which then take their very places.
        state = dataclasses.replace(trainer.init(), params=None)
        state = dataclasses.replace(state, params=jax.device_put(params, shardings))
        batch = trainer.put_batch(draw_tokens(config))
        while True:
            compiled = compile_step(trainer, sparse)
            state, metrics = compiled(state, batch, config.l1_coefficient)
            fits = metrics.overflow == 0
            if fits.all():
                break
            sparse = tuple(bool(s and f) for s, f in zip(sparse, fits, strict=True))

        def step():
            nonlocal state
            state, metrics = compiled(state, batch, config.l1_coefficient)
            return metrics

        row |= {
            "micro_batch": config.micro_batch,
            "batch_tokens": config.batch_tokens,
            "nnz_by_layer": np.asarray(metrics.nnz, np.float64).round(1).tolist(),
            "sparse_layers": sum(sparse),
            "ce": float(metrics.ce),
            "grad_norm": float(metrics.grad_norm),
            "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        }
        row |= expected(config, mesh.size, record.device())
        row["ms"] = milliseconds(step)
        row["tokens_per_second"] = config.batch_tokens / row["ms"] * 1e3
        row |= collectives.measure(step, mesh.size)
    return sparse


def draw_tokens(config: Config) -> np.ndarray:
    """Sequences of a step, which begin with the token 0."""
    shape = (config.batch_sequences, config.model.context + 1)
    tokens = np.random.default_rng(0).integers(1, config.model.vocab_size, shape, dtype=np.int32)
    tokens[:, 0] = 0
    return tokens


def compile_step(trainer: Trainer, sparse: tuple[bool, ...]):
    step = trainer.step_with(sparse)
    return step.lower(trainer.abstract_state, trainer.abstract_batch, 0.0).compile()


def milliseconds(step: Callable[[], StepMetrics]) -> float:
    """Median of a step's time among others, as in training.

    Not by `timing.milliseconds`, which holds back the first device alone: it would never wait for
    the others.
    """

    def mean(calls):
        start = time.perf_counter()
        jax.block_until_ready([step() for _ in range(calls)])
        return (time.perf_counter() - start) * 1e3 / calls

    calls = max(1, min(MOST_CALLS, int(REPEAT_MS / mean(1))))
    return statistics.median(mean(calls) for _ in range(REPEATS))


def expected(config: Config, devices: int, device_kind: str) -> dict[str, float]:
    """What `twell_jax.train.roofline` says, if it knows the hardware: lower bounds, dense."""
    for name, hardware in estimate.HARDWARE.items():
        if name in device_kind.lower():
            cost = estimate.step(config, devices, hardware)
            over_mesh = cost.seconds["fsdp collectives"] + cost.seconds["data collectives"]
            return {
                "estimate_ms": max(cost.seconds.values()) * 1e3,
                "estimate_collective_ms": over_mesh * 1e3,
                "estimate_collective_bytes": cost.fsdp + cost.data,
            }
    return {}


if __name__ == "__main__":
    main()

"""Whole training steps of a shipped configuration, on one device and on several.

    python -m benchmarks.training [configs/0p5b.yaml] [key=value ...] [--devices 1 2 4]
        [--only "xla, relu"] [--out DIRECTORY]

Weights are random, with patterns as in benchmarks.inference. They keep that pattern: the
learning rate is practically 0. "sparse" has the gradients that train.py plans for each layer, and
"float8" products of 8-bit operands, as `model.matmul_dtype` says. "qwix" is "xla" with such
products by Qwix, a package that the others do without.

Every number of devices is measured twice: data parallel, and with FSDP over all of them. The work
of a device stays the same: `batch_tokens` counts per device and is one micro-batch unless it is
given. Efficiency is tokens per second and device, relative to the same variant on one device.
"""

import dataclasses
import gc
import itertools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from benchmarks import collectives, inference, record
from twell_jax import config as config_lib
from twell_jax.config import Config
from twell_jax.models import Transformer, sharding
from twell_jax.train import roofline
from twell_jax.train.gradient_plan import GradientPlan
from twell_jax.train.served import first_plan
from twell_jax.train.state import StepMetrics
from twell_jax.train.trainer import ModelGradients, Trainer

_VARIANTS = {
    "xla, silu": ["model.ffn_implementation=xla", "model.activation=silu", "l1_coefficient=0"],
    "xla, relu": ["model.ffn_implementation=xla"],
    "sparse, relu": ["model.ffn_implementation=mosaic", "sparse_gradients_every=1"],
}
# Patterns stay as they were drawn, so that there is nothing to control.
_PUBLISHED = ["l1_coefficient=2e-5", "union_target=null", "lasso_share=0"]
VARIANTS = _VARIANTS | {
    **{
        f"{name}, float8": [*changes, "model.matmul_dtype=float8"]
        for name, changes in _VARIANTS.items()
    },
    "qwix, silu": _VARIANTS["xla, silu"],
    "qwix, relu": _VARIANTS["xla, relu"],
}
STEPS = 11  # that are timed


class QwixTrainer(Trainer):
    """A trainer whose model's layers multiply operands of 8 bits by Qwix, with Qwix's own scales.

    The head is none of them.
    """

    def __init__(self, config: Config, document_end: int, mesh: jax.sharding.Mesh) -> None:
        super().__init__(config, document_end, mesh)
        import qwix

        dtypes = {"weight_qtype": "float8_e4m3fn", "act_qtype": "float8_e4m3fn"}
        rule = qwix.QtRule(module_path=".*", bwd_qtype="float8_e5m2", **dtypes)

        def make() -> Transformer:
            model = Transformer(config.model, rngs=nnx.Rngs(0))
            tokens = jnp.zeros((1, config.model.context), jnp.int32)
            return qwix.quantize_model(model, qwix.QtProvider([rule]), tokens, methods=["hidden"])

        with nnx.logical_axis_rules(sharding.LOGICAL_AXES):
            self._graph = nnx.graphdef(nnx.eval_shape(make))


def main() -> None:
    parser = record.parser(__doc__)
    parser.add_argument("config", nargs="?", default="configs/0p5b.yaml")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    parser.add_argument("--devices", type=int, nargs="+", help="how many (default: all there are)")
    parser.add_argument("--only", nargs="+", choices=VARIANTS, default=list(VARIANTS))
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
        plan = None
        for count, fsdp in meshes:
            config = configure(args.config, variant, count, fsdp, args.overrides)
            if params is None:
                params = draw_params(config, inference.NNZ[name])
            row = {"config": name, "implementation": variant, "devices": count, "fsdp": fsdp}
            rows.append(row)
            try:
                plan = measure(row, config, params, plan)
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
    fixed = ["optimizer.lr=1e-30", *_PUBLISHED, *VARIANTS[variant]]
    config = config_lib.load(path, [*fixed, *overrides, f"mesh.fsdp={fsdp}"])
    tokens_per_device = config.micro_batch * config.model.context
    if any(override.startswith("batch_tokens=") for override in overrides):
        tokens_per_device = config.batch_tokens
    return config.model_copy(update={"batch_tokens": devices * tokens_per_device})


def draw_params(config: Config, nnz: float) -> nnx.State:
    """Random parameters, on the host, with which a token has `nnz` active neurons on average."""
    spread = inference.profile(config.model.layers, nnz)
    return jax.device_get(inference.with_pattern(config.model, spread, jax.random.key(0)))


def measure(
    row: dict[str, Any], config: Config, params: nnx.State, plan: GradientPlan | None
) -> GradientPlan | None:
    """Adds to `row` the metrics of the steps, their speed and the time of collectives.

    What was measured before a failure stays in `row`. `plan` is what to begin with, None for one
    with all layers sparse. Returns the plan at which the layers come to rest; None if the config
    plans none.
    """
    devices = jax.devices()[: row["devices"]]
    mesh = sharding.make_mesh(config.mesh.shape(len(devices)), devices)
    with jax.set_mesh(mesh):
        kind = QwixTrainer if row["implementation"].startswith("qwix") else Trainer
        trainer = kind(config, document_end=0, mesh=mesh)
        shardings = jax.tree.map(lambda leaf: leaf.sharding, trainer.abstract_state.params)
        # The trainer's own parameters are freed first, so that these can take their memory.
        state = dataclasses.replace(trainer.init(), params=None, rounded=None)
        state = dataclasses.replace(state, params=jax.device_put(params, shardings))
        state = trainer.with_rounded(state)
        drawn = config.model.vocab_size, config.batch_sequences, config.model.context
        batch = trainer.put_batch(inference.draw_tokens(*drawn))
        if plan is None and (first := first_plan(config, trainer)):
            plan = first.all_sparse  # most come to rest there, and each plan has to be compiled
        while True:
            compiled = compile_step(trainer, plan.ffn_gradients if plan else None)
            state, metrics = compiled(state, batch, config.l1_coefficient)
            if plan is None:
                break
            state = trainer.order_by_use(state, metrics.tiles, metrics.nnz)
            state, metrics = compiled(state, batch, config.l1_coefficient)
            measured = metrics.union, metrics.listed, metrics.overflow
            following = plan.revised(*(np.asarray(of_layers).tolist() for of_layers in measured))
            if following.announced == plan.capacities:
                break
            plan = following.followed

        def step() -> StepMetrics:
            nonlocal state
            state, metrics = compiled(state, batch, config.l1_coefficient)
            return metrics

        row |= {
            "micro_batch": config.micro_batch,
            "batch_tokens": config.batch_tokens,
            "nnz_by_layer": np.asarray(metrics.nnz, np.float64).round(1).tolist(),
            "sparse_layers": sum(plan.sparse) if plan else 0,
            "ce": float(metrics.ce),
            "grad_norm": float(metrics.grad_norm),
            "peak_bytes": compiled.memory_analysis().peak_memory_in_bytes,
        }
        row |= expected(config, mesh.size, record.device())
        row["ms"] = milliseconds(step)
        row["tokens_per_second"] = config.batch_tokens / row["ms"] * 1e3
        row |= collectives.measure(step, mesh.size)
    return plan


def compile_step(trainer: Trainer, gradients: ModelGradients | None) -> jax.stages.Compiled:
    """The step with these gradients, compiled for the trainer's devices."""
    step = trainer.step_with(gradients)
    return step.lower(trainer.abstract_state, trainer.abstract_batch, 0.0).compile()


def milliseconds(step: Callable[[], StepMetrics]) -> float:
    """The median time from the end of a step to the end of the next one.

    As in train.py, each is enqueued while the step before runs, so that what XLA does before a step
    costs nothing (docs/design/0015).
    """
    ends, running = [], step()
    for _ in range(STEPS + 1):
        following = step()
        jax.block_until_ready(running)
        ends.append(time.perf_counter())
        running = following
    jax.block_until_ready(running)
    return statistics.median(after - end for end, after in itertools.pairwise(ends)) * 1e3


def expected(config: Config, devices: int, device_kind: str) -> dict[str, float]:
    """Lower bounds by `twell_jax.train.roofline` for dense steps, if it knows the hardware."""
    for name, hardware in roofline.HARDWARE.items():
        if name in device_kind.lower():
            cost = roofline.step(config, devices, hardware)
            over_mesh = cost.seconds["fsdp collectives"] + cost.seconds["data collectives"]
            return {
                "estimate_ms": max(cost.seconds.values()) * 1e3,
                "estimate_collective_ms": over_mesh * 1e3,
                "estimate_collective_bytes": cost.fsdp + cost.data,
            }
    return {}


if __name__ == "__main__":
    main()

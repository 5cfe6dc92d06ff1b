"""The memory that a command needs: a lower bound of it, and in a dry run what a step would take.

The bound is checked before anything is allocated. A dry run compiles a step and does not run it.
"""

import math
import os
from collections.abc import Mapping
from typing import Any

import jax

from twell_jax.config import Config, ConfigError, ModelConfig
from twell_jax.models import sharding
from twell_jax.train.roofline import parameters
from twell_jax.train.trainer import Trainer

_BYTES = {"bfloat16": 2, "float32": 4}
_LARGEST = 2**44  # bytes; no device that a dry run could be about has so much
_MOST_DEVICES = 1024  # of a dry run: in one process XLA compiles for hardly more


def of_device() -> int | None:
    """Bytes of memory of each device; on CPUs the machine's, shared evenly. None: unknown."""
    device = jax.local_devices()[0]
    if device.platform == "cpu":
        machine = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return machine // max(jax.device_count() // jax.process_count(), 1)
    return (device.memory_stats() or {}).get("bytes_limit")


def require_for_training(config: Config, devices: int, available: int | None = _LARGEST) -> None:
    """Checks a lower bound of what a step holds on each device.

    Args:
      config: the run.
      devices: their number.
      available: bytes on each; None is not checked.

    Raises:
      ConfigError: it does not fit, or the mesh does not fit the devices.
    """
    model = config.model
    _, fsdp = config.mesh.shape(devices)
    count, tokens = parameters(model), config.micro_batch * model.context
    _require(
        {
            f"model: {count / 1e9:,.1f} billion parameters with Adam's two moments": (
                3 * _BYTES[model.param_dtype] * count // fsdp
            ),
            "micro_batch: what a micro-batch's layers are given": (
                _BYTES[model.dtype] * tokens * model.layers * model.d_model
            ),
            "batch_tokens: the tokens of a step": 4 * config.batch_tokens // devices,
        },
        available,
    )


def require_for_generation(
    model: ModelConfig, sequences: int, tokens: int, available: int | None
) -> None:
    """Checks the cache of keys and values of so many sequences, each with so many tokens.

    Raises:
      ConfigError: it does not fit.
    """
    width = model.num_kv_heads * model.head_dim
    number = 1 + 4 / model.head_dim if model.kv_cache_dtype else _BYTES[model.dtype]
    cache = int(2 * number * model.layers * sequences * tokens * width)
    _require({f"--max-tokens: the cache of {sequences} x {tokens} tokens": cache}, available)


def print_dry_run(config: Config, devices: int) -> None:
    """Compiles one step for `devices` virtual CPU devices and prints the memory that it would need.

    Call it before JAX sees its devices.

    Raises:
      ConfigError: `devices` is not from 1 to 1024, the mesh or the batch does not divide over them,
        or the state is larger than any device.
    """
    if not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"--dry-run: takes 1 to {_MOST_DEVICES} devices, got {devices}")
    config.accumulation_steps(devices)
    require_for_training(config, devices)
    jax.config.update("jax_platforms", "cpu")
    jax.config.update("jax_num_cpu_devices", devices)
    mesh = sharding.make_mesh(config.mesh.shape(devices))
    jax.set_mesh(mesh)
    trainer = Trainer(config, document_end=0, mesh=mesh)
    compiled = trainer.step.lower(trainer.abstract_state, trainer.abstract_batch, 0.0).compile()

    analysis: Any = compiled.memory_analysis()
    held = analysis.argument_size_in_bytes
    working = analysis.temp_size_in_bytes + analysis.output_size_in_bytes
    working -= analysis.alias_size_in_bytes
    params = sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(trainer.abstract_state.params))
    print(
        f"{params / 1e9:.3f} billion parameters; per device ({devices} in all): "
        f"{held / 2**30:.2f} GiB state and batch, {working / 2**30:.2f} GiB working memory "
        "(as compiled for CPUs, whose attention keeps its scores; GPUs need less)"
    )


def _require(needs: Mapping[str, int], available: int | None) -> None:
    what, most = max(needs.items(), key=lambda need: need[1])
    if available is not None and most > available:
        raise ConfigError(
            f"{what}: at least {most / 2**30:,.0f} GiB on each device, of {available / 2**30:,.1f}"
        )

"""Finds how much memory a training step would need on each device, without running it."""

import math
from typing import Any

import jax

from twell_jax.config import Config, ConfigError
from twell_jax.models import sharding
from twell_jax.train import memory
from twell_jax.train.trainer import Trainer

_MOST_DEVICES = 1024  # in one process XLA compiles for hardly more


def print_memory(config: Config, devices: int) -> None:
    """Compiles one step for `devices` virtual CPU devices and prints the memory that it would need.

    Call it before JAX sees its devices.

    Raises:
      ConfigError: `devices` is not from 1 to 1024, the mesh or the batch does not divide over them,
        or the state is larger than any device.
    """
    if not 1 <= devices <= _MOST_DEVICES:
        raise ConfigError(f"--dry-run: takes 1 to {_MOST_DEVICES} devices, got {devices}")
    config.accumulation_steps(devices)
    memory.require_for_training(config, devices)
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

"""Whether what a command is asked for can fit into memory at all, before anything is allocated."""

import os
from collections.abc import Mapping

import jax

from twell_jax.config import Config, ConfigError, ModelConfig
from twell_jax.train.roofline import parameters

_BYTES = {"bfloat16": 2, "float32": 4}
_LARGEST = 2**44  # bytes; no device that a dry run could be about has so much


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
    cache = 2 * _BYTES[model.dtype] * model.layers * sequences * tokens * width
    _require({f"--max-tokens: the cache of {sequences} x {tokens} tokens": cache}, available)


def _require(needs: Mapping[str, int], available: int | None) -> None:
    what, most = max(needs.items(), key=lambda need: need[1])
    if available is not None and most > available:
        raise ConfigError(
            f"{what}: at least {most / 2**30:,.0f} GiB on each device, of {available / 2**30:,.1f}"
        )

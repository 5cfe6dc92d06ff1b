"""How fast a run trains on its devices, what energy it takes, and how much sparsity sped it up."""

import functools
import os
import time
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import jax

from twell_jax.config import ModelConfig
from twell_jax.train.roofline import HARDWARE, flops_per_token

try:
    import pynvml
except ImportError:
    pynvml = None

type Record = Mapping[str, Any]  # a line of metrics.jsonl

# FLOP/s of dense bfloat16 matmuls, by JAX's name of the device. From NVIDIA's data sheets, where
# those of Hopper count structured sparsity, which doubles them.
_PEAK_FLOPS = {
    "NVIDIA A100-SXM4-40GB": 312e12,
    "NVIDIA A100-SXM4-80GB": 312e12,
    "NVIDIA H100 PCIe": 756e12,
    "NVIDIA H100 NVL": 835e12,
    "NVIDIA H100 80GB HBM3": HARDWARE["h100"].flops,
    "NVIDIA H200": HARDWARE["h200"].flops,
}


def flops_utilisation(model: ModelConfig, tokens_per_second: float) -> float | None:
    """The share of the devices' peak that the model's FLOPs take, all devices together.

    The FLOPs are those of the dense model, forward and backward, whatever is skipped for zeros or
    computed twice. So a sparse run may reach more than its matmuls could. As in PaLM (arXiv
    2204.02311, appendix B), but causal attention counts half.

    Returns:
      A share, 1 for the peak; None without a rate, in float32, or if the peak is not known here.
    """
    peak = _PEAK_FLOPS.get(jax.devices()[0].device_kind)
    if peak is None or model.dtype != "bfloat16" or not tokens_per_second:
        return None
    return tokens_per_second * flops_per_token(model) / (peak * jax.device_count())


def joules(devices: Sequence[jax.Device] | None = None) -> float | None:
    """Energy in joules that GPUs have used since their driver was loaded.

    Args:
      devices: of this process; None takes all of its devices.

    Returns:
      None without the package nvidia-ml-py, a driver, or GPUs that count energy.
    """
    if (gpus := _gpus(tuple(jax.local_devices() if devices is None else devices))) is None:
        return None
    try:
        return sum(map(pynvml.nvmlDeviceGetTotalEnergyConsumption, gpus)) / 1e3
    except pynvml.NVMLError:
        return None


def joules_per_token(used: float, tokens: int) -> float:
    """From what `joules` says that a step used, and the tokens of all processes."""
    return _of_all(used) / tokens


def _of_all(used: float) -> float:
    """What the devices of all processes used, if those of this one did so."""
    return used * jax.device_count() / jax.local_device_count()


class Meter:
    """Adds up what a run has taken, over all the times that it was continued.

    It counts from its creation, before the first step, so pauses to compile, evaluate and save
    count. What starting a process takes does not.

    Args:
      last: the last record of `metrics.jsonl` that stays, from whose totals it goes on; None for a
        new run. Of what came after that record only what is repeated counts.
    """

    def __init__(self, last: Mapping[str, Any] | None) -> None:
        before = {"seconds": 0.0, "joules": 0.0} if last is None else last
        self._before = before.get("seconds"), before.get("joules")
        self._start = time.monotonic(), joules()

    def totals(self) -> dict[str, float | None]:
        """`seconds`, and `joules` of the devices of all processes; None for what is not known."""
        (began, counted), (seconds, used), now = self._start, self._before, joules()
        if seconds is not None:
            seconds += time.monotonic() - began
        if used is None or counted is None or now is None:
            return {"seconds": seconds, "joules": None}
        return {"seconds": seconds, "joules": used + _of_all(now - counted)}


@functools.cache
def _gpus(devices: tuple[jax.Device, ...]) -> tuple[Any, ...] | None:
    """NVML's handles of GPUs."""
    if pynvml is None or devices[0].platform != "gpu":
        return None
    # NVML counts all GPUs of the machine, CUDA those that this variable names, by number or UUID.
    visible = [name.strip() for name in os.environ.get("CUDA_VISIBLE_DEVICES", "").split(",")]
    handles = []
    try:
        pynvml.nvmlInit()
        for device in devices:
            place = device.local_hardware_id
            name = visible[place] if any(visible) else str(place)
            by_name = pynvml.nvmlDeviceGetHandleByUUID
            handles.append(
                pynvml.nvmlDeviceGetHandleByIndex(int(name)) if name.isdigit() else by_name(name)
            )
    except pynvml.NVMLError:
        return None
    return tuple(handles)


def sparse_layers(record: Record) -> int:
    """How many layers had sparse gradients in a step, by its record in `metrics.jsonl`."""
    return sum(record.get("sparse_gradients", []))


def phases(steps: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """The timed steps before the first sparse layer, and those with as many as the last step.

    Args:
      steps: the records of steps in `metrics.jsonl`.

    Returns:
      Of a run whose last step has no sparse layer, no steps, and all that are timed.
    """
    timed = [record for record in steps if record["tokens_per_second"]]
    sparse = sparse_layers(steps[-1])
    if not sparse:
        return [], timed
    start = next((i for i, record in enumerate(timed) if sparse_layers(record)), 0)
    return timed[:start], [r for r in timed[start:] if sparse_layers(r) == sparse]


def against_dense_start(steps: Sequence[Record]) -> str | None:
    """A line on how much faster a run is now than before any of its layers was sparse.

    Both rates are medians of `phases`. If the run changed its devices meanwhile, that counts, too.
    So does what compiling beside dense steps took: XLA times products on the same GPU.

    Args:
      steps: the records of steps in `metrics.jsonl`.

    Returns:
      None if no layer has sparse gradients, or the log does not hold both rates.
    """
    before, after = phases(steps)
    if not (before and after):
        return None
    was, now = (median(r["tokens_per_second"] for r in records) for records in (before, after))
    return (
        f"{now:,.0f} tokens/s with sparse gradients in {sparse_layers(steps[-1])} of "
        f"{len(steps[-1]['nnz'])} layers: {now / was:.2f} times the {was:,.0f} of the dense start, "
        "which may have been timed beside a compilation"
    )

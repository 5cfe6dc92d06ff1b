"""Timing and the JSON files under benchmarks/results/ (see docs/performance.md)."""

import importlib.metadata
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from datetime import date
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

RESULTS = Path(__file__).parent / "results"
_HOLD_MS = 30.0


def milliseconds(f: Callable, *args, calls: int, repeats: int = 7) -> float:
    """Median over `repeats` of the GPU's time for one of at most `calls` calls of a jitted `f`.

    The calls are queued while the GPU is held busy, so that it runs them without waiting for the
    host, as it does in a program that stays ahead of it; there are fewer of them if the host does
    not manage so many in that time.
    """
    hold = _spin if jax.default_backend() == "gpu" else lambda: None
    jax.block_until_ready([hold(), f(*args)])
    times = []
    for count in (0, calls) * repeats:
        start = time.perf_counter()
        results = [hold(), *(f(*args) for _ in range(count))]
        enqueued = time.perf_counter()
        jax.block_until_ready(results)
        times.append((time.perf_counter() - start) * 1e3)
        if (enqueued - start) * 1e3 > 0.8 * _HOLD_MS and calls > 1:
            return milliseconds(f, *args, calls=calls // 2, repeats=repeats)
    held = statistics.median(times[::2])
    return (statistics.median(times[1::2]) - held) / calls


def enqueue_milliseconds(f: Callable, *args, calls: int = 20) -> float:
    """The host's time for one call of a jitted `f`, which does not wait for its result."""
    jax.block_until_ready(f(*args))
    start = time.perf_counter()
    results = [f(*args) for _ in range(calls)]
    elapsed = time.perf_counter() - start
    jax.block_until_ready(results)
    return elapsed / calls * 1e3


@jax.jit
def _spin() -> jax.Array:
    """Keeps one thread of the GPU busy for `_HOLD_MS`."""

    def kernel(out_ref):
        @plgpu.inline_mgpu()
        def wait(_):
            mgpu.utils.inline_ptx(
                "{ .reg .u64 now, end; .reg .pred early; mov.u64 end, %globaltimer; "
                f"add.u64 end, end, {_HOLD_MS * 1e6:.0f}; again: mov.u64 now, %globaltimer; "
                "setp.lt.u64 early, now, end; @early bra again; }",
                has_side_effects=True,
            )

        wait()
        out_ref[0] = jnp.int32(1)

    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )
    out = jax.ShapeDtypeStruct((1,), jnp.int32)
    call = plgpu.kernel(
        kernel, out_type=out, grid=(1,), grid_names=("block",), compiler_params=params
    )
    return call()


def relative_error(out, reference) -> float:
    """||out - reference|| / ||reference|| in float64."""
    out, reference = (np.asarray(a.astype("float32"), np.float64) for a in (out, reference))
    return float(np.linalg.norm(out - reference) / np.linalg.norm(reference))


def write(benchmark: str, rows: list[dict[str, Any]], directory: Path = RESULTS) -> Path:
    """Stores measured rows with the device, versions, commit and command."""
    device = jax.devices()[0].device_kind
    today = date.today()
    packages = ("jax", "jaxlib", "jax-cuda13-plugin", "tokamax")
    content = {
        "benchmark": benchmark,
        "device": device,
        "date": today.isoformat(),
        "commit": _commit(),
        "versions": {name: v for name in packages if (v := _version(name))},
        "command": " ".join(["python", "-m", f"benchmarks.{benchmark}", *sys.argv[1:]]),
        "rows": rows,
    }
    slug = device.lower().replace(" ", "-")
    path = directory / f"{benchmark}-{slug}-{today:%Y%m%d}.json"
    directory.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(content, indent=1) + "\n")
    return path


def line(row: dict[str, Any]) -> str:
    """A row for the terminal."""
    return "  ".join(
        f"{name}={value:.4g}" if isinstance(value, float) else f"{name}={value}"
        for name, value in row.items()
        if name not in ("direction", "dtype", "baseline", "baseline_ms")
    )


def first_line(problem: Exception) -> str:
    """An exception in a line."""
    return f"{type(problem).__name__}: {str(problem).strip().splitlines()[0]}"[:200]


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def _commit() -> str | None:
    if commit := os.environ.get("COMMIT"):  # for copies of the tree without its history
        return commit
    try:
        command = ["git", "describe", "--always", "--dirty"]
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return None

"""Timing of compiled functions."""

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import simt

_HOLD_MS = 30.0  # how long the GPU is held busy while calls are queued


def milliseconds(f: Callable, *args: Any, calls: int, repeats: int = 7) -> float:
    """Time of one call of a jitted `f`, in milliseconds: the median of `repeats` means over calls.

    On a GPU the time is read from the GPU's clock. Calls are queued while the GPU is held busy, so
    that it never waits for the host. If the host cannot queue `calls` calls in that time, fewer are
    made.
    """
    jax.block_until_ready([f(*args), _clock(_HOLD_MS), _clock(0.0)])
    times = []
    for _ in range(repeats):
        start = time.perf_counter()
        begin = _clock(_HOLD_MS)
        results = [f(*args) for _ in range(calls)]
        end = _clock(0.0, after=results)
        on_gpu = isinstance(end, jax.Array)
        if on_gpu and (time.perf_counter() - start) * 1e3 > 0.8 * _HOLD_MS and calls > 1:
            jax.block_until_ready(results)
            return milliseconds(f, *args, calls=calls // 2, repeats=repeats)
        started, ended = (int(np.asarray(stamp).view(np.int64)[0]) for stamp in (begin, end))
        times.append((ended - started) / 1e6)
    return statistics.median(times) / calls


def enqueue_milliseconds(f: Callable, *args: Any, calls: int = 20) -> float:
    """Milliseconds that the host takes to enqueue one call of a jitted `f`, on average."""
    jax.block_until_ready(f(*args))
    start = time.perf_counter()
    results = [f(*args) for _ in range(calls)]
    elapsed = time.perf_counter() - start
    jax.block_until_ready(results)
    return elapsed / calls * 1e3


def _clock(hold_ms: float, after: Any = None) -> jax.Array | np.ndarray:
    """A time in nanoseconds as two halves, int32 `[2]`, the lower one first.

    On a GPU, its own clock is read `hold_ms` milliseconds after all work queued before has ended.
    Elsewhere the host's clock is read as soon as `after` has been computed.
    """
    if jax.default_backend() == "gpu":
        return _gpu_clock(hold_ms)
    jax.block_until_ready(after)
    return np.array([time.perf_counter_ns()]).view(np.int32)


@partial(jax.jit, static_argnums=0)
def _gpu_clock(hold_ms: float) -> jax.Array:
    def kernel(out_ref):
        @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
        def wait(_, out_ref):
            mgpu.utils.inline_ptx(
                "{ .reg .u64 now, end; .reg .pred early; mov.u64 end, %globaltimer; "
                f"add.u64 end, end, {hold_ms * 1e6:.0f}; again: mov.u64 now, %globaltimer; "
                "setp.lt.u64 early, now, end; @early bra again; st.global.b64 [$0], now; }",
                simt.gmem_address(out_ref, simt.const(0)),
                has_side_effects=True,
            )

        wait(out_ref)

    params = plgpu.CompilerParams(
        lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
    )
    out = jax.ShapeDtypeStruct((2,), jnp.int32)
    call = plgpu.kernel(
        kernel, out_type=out, grid=(1,), grid_names=("block",), compiler_params=params
    )
    return call()

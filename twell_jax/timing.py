"""Timing of compiled functions on a GPU."""

import statistics
import time
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu

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

"""Schedules of the kernels on common shapes: where the table of tuned configs comes from.

python -m benchmarks.tune [--out DIRECTORY]
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from pallas_kernels.hopper.common.matmul import Schedule
from pallas_kernels.hopper.twell.fused_ffn import FusedFFNConfig, fused_ffn
from pallas_kernels.hopper.twell.gate_pack import gate_pack
from twell_jax.analysis import patterns, timing

M, NNZ, DTYPE = 16384, 29, jnp.bfloat16
SHAPES = [(512, 1408), (768, 3072), (1024, 2816), (1024, 5632), (2048, 5632), (4096, 11008)]
GATE_CONFIGS = [Schedule(grid_tile_width=width) for width in (4, 8, 16, 32)]
FUSED_CONFIGS = [
    FusedFFNConfig(loads=loads, rows=rows) for loads in (4, 8) for rows in (2, 4, 6, 8)
]


def main() -> None:
    rows = (row for shape in SHAPES for row in measure(*shape))
    record.command("tune", __doc__, rows)


def measure(d: int, h: int) -> Iterator[dict[str, Any]]:
    """Yields a row per kernel and config."""
    key = jax.random.key(d + h)
    x, w_gate = patterns.independent(key, "skewed", M, d, h, NNZ, DTYPE)
    w_up, w_down = (jax.random.normal(k, (h, d)).astype(DTYPE) for k in jax.random.split(key))
    packed = gate_pack(x, w_gate)
    calls = [(gate_pack, config, (x, w_gate)) for config in GATE_CONFIGS]
    calls += [(fused_ffn, config, (x, packed, w_up, w_down)) for config in FUSED_CONFIGS]
    for kernel, config, operands in calls:
        case = {"kernel": kernel.__name__, "m": M, "d": d, "h": h, "config": repr(config)}
        try:
            ms = timing.milliseconds(
                jax.jit(partial(kernel, config=config)), *operands, calls=20, repeats=3
            )
            yield case | {"ms": ms}
        except Exception as problem:  # a config may not fit; the others are still measured
            yield case | {"failed": record.failure(problem)}


if __name__ == "__main__":
    main()

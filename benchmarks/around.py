"""Kernels around the block, and XLA on what defines them: passes of a layer that bytes limit.

    python -m benchmarks.around [--out DIRECTORY]

"norm" is the gradients of an RMSNorm and its residual, "rounding" arrays in 8 bits by rows and by
columns, with some of them rotated back or not: of a layer's queries, keys and values, or of one
array. GB/s are the bytes that must be read and written, over the time.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from pallas_kernels.kernels import HOPPER, REFERENCE, TransformerKernels
from twell_jax.analysis import timing

M, EPS = 16384, 1e-5
IMPLEMENTATIONS = {"xla": REFERENCE, "kernel": HOPPER}


@dataclass(frozen=True)
class Case:
    """What is measured: m tokens of these widths.

    Attributes:
      operation: "norm" or "rounding".
      m: tokens.
      widths: of the parts; of a norm one.
      head_dim: of those that are rotated back, all but the last; 0 if none is.
    """

    operation: str
    m: int
    widths: tuple[int, ...]
    head_dim: int = 0


CASES = [
    *(Case("norm", M * 2048 // width, (width,)) for width in (896, 1024, 2048, 4096)),
    Case("rounding", M, (2048, 2048, 2048), 64),
    Case("rounding", M, (2048,)),
    Case("rounding", M // 2, (4096, 1024, 1024), 128),
    Case("rounding", M // 2, (4096,)),
]


def main() -> None:
    record.command("around", __doc__, (row for case in CASES for row in measure(case)))


def measure(case: Case) -> Iterator[dict[str, Any]]:
    """Yields a row for XLA and one for the kernel."""
    call, operands, moved = (_norm if case.operation == "norm" else _rounding)(case)
    exact = jax.tree.map(lambda a: a.astype(jnp.float32), operands)
    reference = jax.jit(partial(call, REFERENCE, jnp.float32))(*exact)
    times: dict[str, float] = {}
    for name, kernels in IMPLEMENTATIONS.items():
        run = jax.jit(partial(call, kernels, jnp.float8_e5m2))
        error = record.relative_error(run(*operands)[0], reference[0])
        times[name] = timing.milliseconds(run, *operands, calls=50)
        yield {
            "operation": case.operation,
            "m": case.m,
            "widths": list(case.widths),
            "head_dim": case.head_dim,
            "implementation": name,
            "ms": times[name],
            "gb_per_s": moved / times[name] / 1e6,
            "baseline": "xla",
            "baseline_ms": times["xla"],
            "speedup": times["xla"] / times[name],
            "error": error,
        }


type _Made = tuple[Callable[..., tuple[jax.Array, jax.Array]], tuple[Any, ...], int]


def _norm(case: Case) -> _Made:
    def call(kernels: TransformerKernels, _dtype, *operands):
        return kernels.norm_grads(*operands, eps=EPS)

    (width,), keys = case.widths, jax.random.split(jax.random.key(0), 4)
    rows = [jax.random.normal(key, (case.m, width), jnp.bfloat16) for key in keys[:3]]
    scale = jax.random.normal(keys[3], (width,), jnp.float32)
    return call, (*rows, scale), 4 * rows[0].nbytes


def _rounding(case: Case) -> _Made:
    rotated = len(case.widths) - 1 if case.head_dim else 0

    def call(kernels: TransformerKernels, dtype, parts, angles):
        return kernels.round_both(parts, jnp.float32(1), dtype, angles, rotated)

    keys = jax.random.split(jax.random.key(0), len(case.widths))
    pairs = zip(keys, case.widths, strict=True)
    parts = tuple(jax.random.normal(key, (case.m, width), jnp.bfloat16) for key, width in pairs)
    angles = None
    if rotated:
        angle = jax.random.uniform(jax.random.key(1), (case.m // 8, case.head_dim // 2), maxval=6.0)
        angles = jnp.cos(angle), jnp.sin(angle)
    return call, (parts, angles), 2 * sum(part.nbytes for part in parts)


if __name__ == "__main__":
    main()

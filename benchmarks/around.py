"""Kernels around the block, and XLA on what defines them: passes of a layer that bytes limit.

    python -m benchmarks.around [--out DIRECTORY]

"norm" computes the gradients of an RMSNorm and its residual. "rounding" makes 8-bit floats of
gradients, by rows and by columns: of a layer's queries, keys and values, of which the first two are
rotated back, or of one projection. GB/s are the bytes that must be read and written, over the time.
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
from twell_jax.models.rope import Rotation

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
    call, operands, exact, moved = (_norm if case.operation == "norm" else _rounding)(case)
    times: dict[str, float] = {}
    for name, kernels in IMPLEMENTATIONS.items():
        run = jax.jit(partial(call, kernels))
        error = record.relative_error(run(*operands)[0], exact)
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


# A function of the kernels and the operands, these, its first result in float32, bytes to move.
type _Made = tuple[Callable[..., tuple[jax.Array, jax.Array]], tuple[Any, ...], jax.Array, int]


def _norm(case: Case) -> _Made:
    (width,), keys = case.widths, jax.random.split(jax.random.key(0), 4)
    rows = [jax.random.normal(key, (case.m, width), jnp.bfloat16) for key in keys[:3]]
    scale = jax.random.normal(keys[3], (width,), jnp.float32)
    x, of_normed, of_x = (a.astype(jnp.float32) for a in rows)
    root = jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + EPS)
    scaled = of_normed * scale
    along = jnp.mean(scaled * x * root, axis=1, keepdims=True)
    exact = of_x + root * (scaled - x * root * along)

    def call(kernels: TransformerKernels, *operands: jax.Array):
        return kernels.norm_grads(*operands, eps=EPS)

    return call, (*rows, scale), exact, 4 * rows[0].nbytes


def _rounding(case: Case) -> _Made:
    rotated = len(case.widths) - 1 if case.head_dim else 0
    keys = jax.random.split(jax.random.key(0), len(case.widths))
    pairs = zip(keys, case.widths, strict=True)
    parts = [jax.random.normal(key, (case.m, width), jnp.bfloat16) for key, width in pairs]
    angles, exact = None, [part.astype(jnp.float32) for part in parts]
    if rotated:
        angle = jax.random.uniform(jax.random.key(1), (case.m // 8, case.head_dim // 2), maxval=6.0)
        angles = jnp.cos(angle), jnp.sin(angle)
        back = tuple(jnp.tile(a, (8, 1))[None, :, None] for a in (angles[0], -angles[1]))
        exact = Rotation(back, case.head_dim, rotated).of([part[None] for part in exact])
    exact = jnp.concatenate([part.reshape(case.m, -1) for part in exact], axis=1)

    def call(kernels: TransformerKernels, *parts: jax.Array):
        return kernels.round_both(parts, jnp.float32(1), jnp.float8_e5m2, angles, rotated)

    return call, tuple(parts), exact, 2 * sum(part.nbytes for part in parts)


if __name__ == "__main__":
    main()

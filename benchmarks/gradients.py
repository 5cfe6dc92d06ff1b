"""Feed-forward block, forward and backward: sparse gradients against those of jitted dense XLA.

    python -m benchmarks.gradients [--out DIRECTORY]

As benchmarks.ffn, a measured function goes through `LAYERS` sets of weights. Beside the times stand
what a layer keeps from the forward to the backward, without x and the weights, and the peak of what
XLA reserves for one layer's forward and backward.
"""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import record
from benchmarks.ffn import DTYPE, LAYERS, describe, draw
from twell_jax import sparse_ffn, timing

M = 16384
IMPLEMENTATIONS = "xla", "unions"  # the baseline first
CASES = [
    *({"pattern": "skewed", "nnz": nnz} for nnz in (29, 60, 120, 300)),
    {"pattern": "recorded"},
    {"pattern": "recorded", "heavy_every": 1024},
    *({"pattern": "uniform", "nnz": nnz} for nnz in (29, 120, 1500)),
    {"pattern": "skewed", "nnz": 29, "heavy_every": 1},
    {"pattern": "skewed", "nnz": 29, "gated": False},
]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=record.RESULTS)
    args = parser.parse_args()
    rows = []
    for case in CASES:
        for row in measure(**case):
            rows.append(row)
            path = record.write("gradients", rows, args.out)
            print(record.line(row), flush=True)
    print(path)


def measure(
    *,
    pattern: str,
    m: int = M,
    nnz: float = 0,
    heavy_every: int = 0,
    gated: bool = True,
) -> Iterator[dict[str, Any]]:
    """One row per implementation; the first is the baseline. Errors: of y and each gradient."""
    x, layers = draw(m, pattern, nnz, 1, heavy_every, gated)
    dy = jax.random.normal(jax.random.key(m), x.shape).astype(DTYPE)
    operands = x, *layers[0]
    float32 = jax.tree.map(lambda a: a.astype(jnp.float32), (*operands, dy))
    with jax.default_matmul_precision("highest"):
        reference = forward_and_backward(*float32, name="xla")
    _, stats = jax.jit(sparse_ffn)(*operands)
    case = describe("forward and backward", m, pattern, heavy_every, gated, stats)
    baseline_ms = None
    for name in IMPLEMENTATIONS:
        out = forward_and_backward(*operands, dy, name=name)
        pairs = zip(*map(jax.tree.leaves, (out, reference)), strict=True)
        errors = [record.relative_error(grad, ref) for grad, ref in pairs]
        ms = timing.milliseconds(partial(stack, name=name), x, layers, dy, calls=4) / LAYERS
        baseline_ms = baseline_ms or ms
        yield case | {
            "implementation": name,
            "ms": ms,
            "baseline": "xla",
            "baseline_ms": baseline_ms,
            "speedup": baseline_ms / ms,
            "errors": errors,
            "kept_bytes": kept_bytes(operands, name),
            "peak_bytes": peak_bytes(*operands, dy, name=name),
        }


@partial(jax.jit, static_argnames="name")
def forward_and_backward(x, w_gate, w_up, w_down, dy, *, name: str):
    """y, without which XLA would leave out a matmul, and the gradients of sum(y dy)."""
    y, vjp = jax.vjp(partial(output, name=name), x, w_gate, w_up, w_down)
    return y, vjp(dy)


def output(*operands, name: str) -> jax.Array:
    return sparse_ffn(*operands, implementation=name)[0]


@partial(jax.jit, static_argnames="name")
def stack(x, layers: list, dy, *, name: str):
    """Forward and backward of each layer in turn, all on the same x."""
    return [forward_and_backward(x, *weights, dy, name=name) for weights in layers]


def kept_bytes(operands, name: str) -> int:
    """What the forward keeps for the backward, besides its operands."""
    _, vjp = jax.eval_shape(
        lambda *operands: jax.vjp(partial(output, name=name), *operands), *operands
    )
    size = sum(a.size * a.dtype.itemsize for a in jax.tree.leaves(vjp))
    return size - sum(a.nbytes for a in jax.tree.leaves(operands))


def peak_bytes(*operands, name: str) -> int:
    """What XLA reserves besides arguments and results."""
    compiled = forward_and_backward.lower(*operands, name=name).compile()
    return compiled.memory_analysis().temp_size_in_bytes


if __name__ == "__main__":
    main()

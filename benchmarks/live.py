"""Live width: layers in one loop, each with its own number of live neurons, by the same kernels.

    python -m benchmarks.live [--out DIRECTORY]

A measured function runs the block with the stacked weights of `len(dead)` layers in a scan, as a
model does; in each layer the active neurons come first. Times are per layer. "live" has the
number of them, on the device; the others compute all neurons. Without dead neurons, the difference
is what the number costs. Only the last layer's y is kept, and its error given: XLA would copy each
into an array of all layers, as no model does.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from benchmarks import ffn, record
from pallas_kernels.kernels import MAX_FEW_TOKENS
from twell_jax import sparse_ffn
from twell_jax.analysis import patterns, timing

NNZ = 29
_DEAD_BELOW = -15.0  # the gates' last weights are above, for live neurons, or -30, for dead ones
DEAD = [4 * (0.0,), 4 * (0.3,), 4 * (0.5,), (0.0, 0.3, 0.56, 0.74)]  # shares, by layer
CASES = [{"m": m, "dead": dead} for m in (16384, 2048, 1, 8, 32) for dead in DEAD]


def main() -> None:
    rows = (row for case in CASES for row in measure(**case))
    record.command("live", __doc__, rows)


def measure(
    *, m: int, dead: tuple[float, ...], d: int = ffn.D, h: int = ffn.H
) -> Iterator[dict[str, Any]]:
    """Yields a row for dense XLA, the kernels, and the kernels with the numbers."""
    x, weights, live = draw(m, d, h, dead)
    kernels = "mosaic" if m <= MAX_FEW_TOKENS else "unions"
    float32 = jax.tree.map(lambda a: a.astype(jnp.float32), (x, weights))
    with jax.default_matmul_precision("highest"):
        reference, nnz = loop(*float32, None, name="xla")
    variants = {"xla": ("xla", None), kernels: (kernels, None), "live": (kernels, live)}
    case = {
        "m": m, "d": x.shape[1], "h": weights[0].shape[1], "pattern": "skewed",
        "dead": list(dead), "live": live.tolist(), "nnz_mean": float(jnp.mean(nnz)),
    }  # fmt: skip
    times: dict[str, float] = {}
    for label, (name, numbers) in variants.items():
        run = partial(loop, name=name)
        error = record.relative_error(run(x, weights, numbers)[0], reference)
        calls = max(2, min(50, 2**17 // m))
        times[label] = timing.milliseconds(run, x, weights, numbers, calls=calls) / len(dead)
        yield case | {
            "implementation": label,
            "ms": times[label],
            "baseline": "xla",
            "baseline_ms": times["xla"],
            "speedup": times["xla"] / times[label],
            "gain": times.get(kernels, times[label]) / times[label],
            "error": error,
        }


def draw(m: int, d: int, h: int, dead: tuple[float, ...]) -> tuple[jax.Array, Any, jax.Array]:
    """x `[m, D]`, stacked weights whose dead neurons are the last, and how many others there are.

    Neurons are dead by the pattern: for few tokens, most of the others are not active either.
    """
    layers, live = [], []
    for layer, share in enumerate(dead):
        key = jax.random.key(m)  # which makes x the same
        x, w_gate = patterns.independent(key, "skewed", m, d, h, NNZ, ffn.DTYPE, dead=share)
        weights = ffn.weights(jax.random.fold_in(key, layer), w_gate, gated=True)
        is_live = weights[0][:, -1] > _DEAD_BELOW
        order = jnp.argsort(~is_live)
        layers.append(jax.tree.map(lambda w, order=order: w[order], weights))
        live.append(jnp.sum(is_live, dtype=jnp.int32))
    return x, jax.tree.map(lambda *w: jnp.stack(w), *layers), jnp.stack(live)


@partial(jax.jit, static_argnames="name")
def loop(x: jax.Array, weights: Any, live: jax.Array | None, *, name: str) -> Any:
    """y of the last layer, and nnz of each; all read the same x."""

    def layer(y, operands):
        weights, live = operands
        y, stats = sparse_ffn(x, *weights, live=live, **ffn.BLOCKS[name])
        return y, stats.nnz

    return jax.lax.scan(layer, jnp.zeros_like(x), (weights, live))


if __name__ == "__main__":
    main()

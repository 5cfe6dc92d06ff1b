"""The sparse block on unions with 8-bit weights, beside dense blocks with FP8 operands."""

from functools import partial
from typing import Any

import jax
from jax import lax

from benchmarks import record
from pallas_kernels.quantised import quantise
from twell_jax import sparse_ffn
from twell_jax.analysis import timing
from twell_jax.models.quantised import QUANTISED_OPTIONS


def measure(
    x: jax.Array, layers: list, calls: int, *, projections: int
) -> tuple[jax.Array, dict[str, Any]]:
    """Times the block with each layer's weights in turn.

    Args:
      x: bfloat16 `[M, D]`; each layer quantises it anew.
      layers: triples of bfloat16 `[H, D]`.
      calls: how many calls are queued at a time.
      projections: how many weights are quantised beforehand: 1 for the gate, 2 for gate and up.

    Returns:
      y of the first layer; "ms" per layer, and "twin_error" of this y against what XLA computes of
      the same quantised weights.
    """
    prepared = [
        (*(quantise(w) for w in layer[:projections]), *layer[projections:]) for layer in layers
    ]
    ms = timing.milliseconds(stack, x, prepared, calls=calls)
    (y,) = stack(x, prepared[:1])
    return y, {"ms": ms / len(layers), "twin_error": record.relative_error(y, twin(x, prepared[0]))}


@partial(jax.jit, compiler_options=QUANTISED_OPTIONS)
def twin(x: jax.Array, layer: tuple) -> jax.Array:
    """The block as dense XLA defines it."""
    return sparse_ffn(x, *layer, implementation="xla")[0]


@jax.jit
def stack(x: jax.Array, layers: list) -> list[jax.Array]:
    """The block with each layer's weights in turn, all on the same x."""
    results, block = [], partial(sparse_ffn, packing="unions")
    for layer in layers:
        y, _ = block(x, *layer)
        x, y = lax.optimization_barrier((x, y))  # or one quantised x would serve all layers
        results.append(y)
    return results

"""The dense feed-forward block with FP8 operands by XLA, which leaves its matmuls to cuBLASLt.

XLA's GemmRewriter takes products of e4m3 matrices, either as they are or converted and multiplied
by a scalar each (openxla/xla, xla/service/gpu/transforms/gemm_rewriter.cc). So scales of tensors
are part of a product here, and scales of rows are multiplied with its result.
"""

from functools import partial
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

from twell_jax.analysis import timing
from twell_jax.models import QUANTISED_OPTIONS

E4M3 = jnp.float8_e4m3fn
LARGEST = float(jnp.finfo(E4M3).max)  # what is larger becomes NaN
CALL = "__cublas$lt$matmul$f8"  # what XLA's compiled text names these matmuls


class Scaled(NamedTuple):
    """A matrix `values * scale`: e4m3 `[N, K]`, and float32 `[N, 1]`, or `[]` for the tensor."""

    values: jax.Array
    scale: jax.Array


def measure(
    x: jax.Array, layers: list, calls: int, *, rows: bool, fast: bool
) -> tuple[jax.Array, dict[str, Any]]:
    """Times the block with each layer's weights in turn.

    Args:
      x: bfloat16 `[M, D]`; each layer quantises it anew, and its h.
      layers: triples of bfloat16 `[H, D]`, quantised beforehand.
      calls: how many calls are queued at a time.
      rows: whether each row of an operand has a scale of its own.
      fast: whether tensor cores may keep their sums in fewer bits than float32 has.

    Returns:
      y of the first layer; "ms" per layer and "fp8_matmuls", the number per layer.

    Raises:
      NotImplementedError: XLA left none of the matmuls to cuBLASLt's FP8.
    """
    prepared = [prepare(layer, rows=rows) for layer in layers]
    run = stack.lower(x, prepared, rows=rows, fast=fast).compile(QUANTISED_OPTIONS)
    matmuls = run.as_text().count(f'custom_call_target="{CALL}"')
    if not matmuls:
        raise NotImplementedError(f"XLA's compiled text has no {CALL}")
    ms = timing.milliseconds(run, x, prepared, calls=calls)
    details = {"ms": ms / len(layers), "fp8_matmuls": matmuls / len(layers)}
    return run(x, prepared)[0], details


@partial(jax.jit, static_argnames="rows")
def prepare(layer: tuple[jax.Array, jax.Array, jax.Array], *, rows: bool) -> list[Scaled]:
    """Weights as the products take them: gate and up `[H, D]`, down `[D, H]`."""
    w_gate, w_up, w_down = layer
    return [quantised(w, rows=rows) for w in (w_gate, w_up, w_down.T)]


@partial(jax.jit, static_argnames=("rows", "fast"))
def stack(x: jax.Array, layers: list[list[Scaled]], *, rows: bool, fast: bool) -> list[jax.Array]:
    """The block with each layer's weights in turn, all on the same x."""
    results = []
    for layer in layers:
        y = block(x, *layer, rows=rows, fast=fast)
        x, y = lax.optimization_barrier((x, y))  # or one quantised x would serve all layers
        results.append(y)
    return results


def block(x, gate: Scaled, up: Scaled, down: Scaled, *, rows: bool, fast: bool) -> jax.Array:
    """relu(x gate^T) * (x up^T) down^T, with x and h quantised as the weights are."""
    q = quantised(x, rows=rows)
    h = jax.nn.relu(product(q, gate, rows, fast)) * product(q, up, rows, fast)
    return product(quantised(h, rows=rows), down, rows, fast).astype(x.dtype)


def quantised(a: jax.Array, *, rows: bool) -> Scaled:
    """A matrix with a scale for each row, or one that bfloat16 holds for all."""
    largest = jnp.max(jnp.abs(a), axis=1 if rows else None, keepdims=rows).astype(jnp.float32)
    scale = jnp.where(largest > 0, largest / LARGEST, 1.0)
    if not rows:
        scale = scale.astype(jnp.bfloat16).astype(jnp.float32)
    return Scaled(jnp.clip(a / scale, -LARGEST, LARGEST).astype(E4M3), scale)


def product(a: Scaled, b: Scaled, rows: bool, fast: bool) -> jax.Array:
    """a b^T: float32 values that were rounded to bfloat16 before scales of rows, or bfloat16."""
    multiply = partial(
        lax.dot_general,
        dimension_numbers=(((1,), (1,)), ((), ())),
        precision=lax.Precision.DEFAULT if fast else lax.Precision.HIGHEST,
        preferred_element_type=jnp.bfloat16,
    )
    if rows:
        return multiply(a.values, b.values).astype(jnp.float32) * a.scale * b.scale.T
    return multiply(*(m.values.astype(jnp.bfloat16) * m.scale.astype(jnp.bfloat16) for m in (a, b)))

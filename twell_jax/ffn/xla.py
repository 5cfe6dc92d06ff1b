"""The definition of the sparse feed-forward block, in dense JAX."""

from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from pallas_kernels import quantised
from pallas_kernels.quantised import Quantised
from pallas_kernels.weights import Weights, only_live
from twell_jax.ffn import activations, float8, stats
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.lasso import Windows
from twell_jax.ffn.stats import FFNStats


class Biases(NamedTuple):
    """The biases of a block, `[H]`, `[H]` and `[D]`; None where there is none."""

    gate: ArrayLike | None = None
    up: ArrayLike | None = None
    down: ArrayLike | None = None


NO_BIASES = Biases()

# From so many tokens on, the gate's product is kept apart from what follows it. Prompts of 512
# tokens with ReLU take 10 % less time, as XLA then reads the gate's stacked weights in place, and
# gradients of 4096 tokens 4 % less (docs/design/0022). In 8 bits one product makes gate and up.
_APART_FROM = 512


def ffn(
    x: jax.Array,
    weights: Weights,
    biases: Biases = NO_BIASES,
    *,
    activation: Activation = "relu",
    windows: Windows | None = None,
    residual: jax.Array | None = None,
    in_8_bits: bool = False,
) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` without its checks; `in_8_bits` if its `matmul_dtype` is "float8"."""
    up, *gates = _products(x, weights.inner[::-1], 1, in_8_bits)
    up = _with_bias(up, biases.up)
    gate = _with_bias(gates[0], biases.gate) if gates else None
    if gate is not None and gate.size >= _APART_FROM * gate.shape[-1] and not in_8_bits:
        gate = jax.lax.optimization_barrier(gate)
    hidden = activations.hidden(activation, gate, up)
    h, active = (only_live(a, weights.live) for a in hidden)
    # XLA accumulates a product of 16-bit matrices in float32 and rounds it once. Float32 outputs
    # (preferred_element_type) would turn the gradients' matmuls into float32 ones, which doubled
    # the time of forward and backward on an H100 (docs/design/0009).
    (y,) = _products(h, [weights.down], 0, in_8_bits)
    return add(residual, _with_bias(y, biases.down)), stats.of_dense(h, active, windows)


def add(residual: jax.Array | None, y: jax.Array) -> jax.Array:
    """`residual + y`, or y if there is no residual."""
    return y if residual is None else residual + y


def _products(x: jax.Array, weights: Sequence, axis: int, in_8_bits: bool) -> list[jax.Array]:
    """The products of x with weights, summed over its last axis and this one of theirs."""
    if in_8_bits:
        return float8.products(x, weights, axis)
    dimensions = ((x.ndim - 1,), (axis,)), ((), ())
    return [
        quantised.product(x, w, axis - 2)
        if isinstance(w, Quantised)
        else jax.lax.dot_general(x, w, dimensions)
        for w in weights
    ]


def _with_bias(product: jax.Array, b: ArrayLike | None) -> jax.Array:
    return product if b is None else product + b

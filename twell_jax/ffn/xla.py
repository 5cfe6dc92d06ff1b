"""The definition of the sparse feed-forward block, in dense JAX."""

from typing import NamedTuple

import jax
from jax.typing import ArrayLike

from pallas_kernels import quantised
from pallas_kernels.quantised import Quantised
from pallas_kernels.weights import Weights, only_live
from twell_jax.ffn import activations, stats
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
# gradients of 4096 tokens 4 % less (docs/design/0022).
_APART_FROM = 512


def ffn(
    x: jax.Array,
    weights: Weights,
    biases: Biases = NO_BIASES,
    *,
    activation: Activation = "relu",
    windows: Windows | None = None,
    residual: jax.Array | None = None,
) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` without its checks."""
    up = _affine(x, weights.up, -1, biases.up)
    gate = None if weights.gate is None else _affine(x, weights.gate, -1, biases.gate)
    if gate is not None and gate.size >= _APART_FROM * gate.shape[-1]:
        gate = jax.lax.optimization_barrier(gate)
    hidden = activations.hidden(activation, gate, up)
    h, active = (only_live(a, weights.live) for a in hidden)
    # XLA accumulates a product of 16-bit matrices in float32 and rounds it once. Float32 outputs
    # (preferred_element_type) would turn the gradients' matmuls into float32 ones, which doubled
    # the time of forward and backward on an H100 (docs/design/0009).
    y = _affine(h, weights.down, -2, biases.down)
    return add(residual, y), stats.of_dense(h, active, windows)


def add(residual: jax.Array | None, y: jax.Array) -> jax.Array:
    """`residual + y`, or y if there is no residual."""
    return y if residual is None else residual + y


def _affine(x, w, axis, b):
    if isinstance(w, Quantised):
        product = quantised.product(x, w, axis)
    else:
        product = jax.lax.dot_general(x, w, (((x.ndim - 1,), (axis % 2,)), ((), ())))
    return product if b is None else product + b

"""The two passes of a block by kernels, for callers that keep what lies between them.

JAX's own callers differentiate `sparse_ffn`. Others, such as PyTorch's autograd, call a program for
each pass. As they learn on the host which way the backward has to go, they need no program that has
all ways.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from pallas_kernels.layouts.neuron_lists import slots_for
from pallas_kernels.weights import DTYPES, Weights
from twell_jax.ffn import activations, api, dispatch, unions, xla
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import LayerGradients
from twell_jax.ffn.residuals import Deciding, Residuals
from twell_jax.ffn.stats import FFNStats

_TRANSPOSED = 8  # rows and columns of which a kernel transposes a multiple


class Choice(NamedTuple):
    """What a forward means for the backward, known on the host.

    Attributes:
      way: that of the backward.
      gains: whether both passes take less time than dense ones.
    """

    way: int
    gains: bool


class Passes(NamedTuple):
    """Functions of the operands `x: [M, D]`, w_gate, `[H, D]` or None, w_up and w_down, `[H, D]`.

    Attributes:
      forward: operands -> y, the statistics, and a tree of what the backward needs besides them.
      deciding: that tree -> the arrays of it, int32, that the way of the backward follows from.
      choice: their values on the host -> what follows.
      backward: (the way, that tree, operands, the gradients for y and for the sum of |h| over all
        tokens) -> those for the operands, None for None.
    """

    forward: Callable[..., tuple[jax.Array, FFNStats, Any]]
    deciding: Callable[[Any], Sequence]
    choice: Callable[..., Choice]
    backward: Callable[..., list[jax.Array | None]]


def of_block(operands: Sequence, activation: Activation, gradients: LayerGradients) -> Passes:
    """The passes of `sparse_ffn(*operands, implementation="mosaic")` on one device.

    Args:
      operands: their shapes and dtypes.
      activation, gradients: as of `sparse_ffn`.

    Raises:
      ValueError, CannotServe: as `sparse_ffn` does.
    """
    x, w_gate, w_up, w_down = operands
    call = api.checked(
        x, w_gate, w_up, w_down, None, None, activation, "mosaic", None, gradients, None, None, None
    )
    rule, capacity = api.select(call).rule, call.request.capacity
    if rule.algorithm != "unions" or capacity is None:
        return _with_dense_gradients(activation)
    kernels, _ = dispatch.back_end(call.weights.down)
    act = activations.rectifier(activation)
    assert kernels is not None and act is not None  # the rule would have been excluded

    def forward(x: jax.Array, *weights: jax.Array) -> tuple[jax.Array, FFNStats, Any]:
        given = kernels, act, x, Weights(*weights)
        output, kept = unions.forward_with_residuals(*given, capacity=capacity)
        return *output.with_stats(kept.overflow), kept

    def deciding(kept: Residuals) -> Sequence:
        return kept.needs, kept.lengths, kept.heavy_count

    def choice(needs: np.ndarray, lengths: np.ndarray, heavy: np.ndarray) -> Choice:
        found = Deciding(needs, slots_for(lengths).sum(), heavy[0])
        shape = unions.room(len(w_down), len(x), capacity), len(x), len(w_down)
        return Choice(int(found.way(*shape, capacity)), found.gains(*shape, w_gate is not None))

    def backward(way, kept, operands, dy, of_sum):
        x, *weights = operands
        given = kernels, act, kept, x, Weights(*weights), dy, of_sum
        of_x, of_weights = unions.backward(*given, capacity=capacity, way=way)
        return [of_x, of_weights.gate, of_weights.up, of_weights.down]

    return Passes(forward, deciding, choice, backward)


def transpose(matrix: jax.Array, w_down: jax.Array | jax.ShapeDtypeStruct) -> jax.Array:
    """The transpose, by a kernel if there are some for the block of `w_down: [H, D]`: XLA would put
    its own between them."""
    kernels, _ = dispatch.back_end(w_down)
    fits = matrix.dtype in DTYPES and not any(size % _TRANSPOSED for size in matrix.shape)
    fits &= matrix.nbytes < 2**31
    return kernels.transposed(matrix) if fits and kernels is not None else matrix.T


def _with_dense_gradients(activation: Activation) -> Passes:
    """They compute everything again, densely."""

    def forward(*operands: jax.Array) -> tuple[jax.Array, FFNStats, Any]:
        y, stats = api.sparse_ffn(*operands, activation=activation, implementation="mosaic")
        return y, stats, ()

    def backward(way, kept, operands, dy, of_sum):
        del way, kept

        def block(x, *weights):
            y, stats = xla.ffn(x, Weights(*weights), activation=activation)
            return y, stats.l1 * len(x)  # l1 is a mean over tokens

        _, vjp = jax.vjp(block, *operands)
        return [*vjp((dy, of_sum))]

    return Passes(forward, lambda kept: kept, lambda: Choice(0, True), backward)

"""The sparse feed-forward block as one operation: `sparse_ffn`.

    g = act(x w_gate^T)     u = x w_up^T     h = g * u     y = h w_down     (gated)
    h = act(x w_up^T)                                      y = h w_down     (non-gated)

With activation "drelu" h = relu(g) * relu(u).

Every weight is neuron-major, `[H, D]`: row n of `w_gate`, `w_up` and `w_down` belongs to neuron n,
so that y = sum_n h_n * w_down[n]. `xla.ffn` is the definition that all other implementations are
tested against; `dispatch` chooses which one serves a call.
"""

import os
from dataclasses import replace
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.typing import ArrayLike

from pallas_kernels.quantised import Quantised
from pallas_kernels.weights import Weights
from twell_jax.ffn import (
    activations,
    arguments,
    dispatch,
    mosaic,
    partition,
    remedies,
    xla,
)  # fmt: skip
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.algorithms import Case, Implementation, LayerGradients, Packing, Request
from twell_jax.ffn.arguments import ALL_OLD_NAMES, MatmulDtype, refuses_old_names
from twell_jax.ffn.dispatch import Selection
from twell_jax.ffn.lasso import Windows
from twell_jax.ffn.numeric import STANDARD
from twell_jax.ffn.stats import FFNStats
from twell_jax.ffn.union_lasso import WindowGrid
from twell_jax.ffn.xla import NO_BIASES, Biases

_VARIABLE = "TWELL_JAX_IMPLEMENTATION"  # for debugging; read when a function is traced


@refuses_old_names(*ALL_OLD_NAMES)
@STANDARD
def sparse_ffn(
    x: ArrayLike,
    w_gate: ArrayLike | Quantised | None,
    w_up: ArrayLike | Quantised,
    w_down: ArrayLike | Quantised,
    *,
    biases: Biases | None = None,
    live: ArrayLike | None = None,
    activation: Activation = "relu",
    implementation: Implementation | None = None,
    packing: Packing | None = None,
    gradients: LayerGradients = None,
    windows: Windows | None = None,
    residual: ArrayLike | None = None,
    matmul_dtype: MatmulDtype | None = None,
) -> tuple[jax.Array, FFNStats]:
    """Feed-forward block whose activations are mostly zero (arXiv 2603.23198, section 3).

    Operands may be anything that `jnp.asarray` takes, such as NumPy arrays and `nnx.Param`s.

    Args:
      x: `[..., D]` tokens; bfloat16, float16 or float32.
      w_gate: `[H, D]`, or None for the non-gated block.
      w_up: `[H, D]`.
      w_down: `[H, D]`. Any of the three may be `Quantised`, w_down along axis -2. What it is
        multiplied with, x or h, is then quantised, too, a scale for each token; the product of the
        two is what the block means (`pallas_kernels.quantised.product`). The kernels for few
        tokens and unions compute it unless w_down is `Quantised`; else XLA does. There are no
        gradients for either.
      biases: `Biases(gate, up, down)`, `[H]`, `[H]` and `[D]`; any of them may be None.
      live: an integer from 0 to H, which may be on the device: neurons from this number on are
        taken as never active, and their weights get gradients of zero. The kernels for few tokens
        and unions then leave out the gates of these neurons, in whole tiles; for 65 to 1023 tokens
        they serve only if they are asked for. A larger number on the device is like H, a
        negative one like 0. None: any may be active.
      activation: "relu"; "relu2", its square; "drelu", ReLU on both factors; a `Rectifier`, such as
        Rectifier(threshold=0.01), z where z is above 0.01, else 0 (FATReLU); or "silu" for the
        dense twin, which no kernel serves.
      implementation: "xla" (dense, on any device) or "mosaic" (Pallas kernels, on Hopper GPUs).
        None takes what the environment variable TWELL_JAX_IMPLEMENTATION names. If it is not set,
        None takes the kernels where they are known to be faster; `explain` says why. If only the
        dtype, the widths or biases keep the kernels of a Hopper GPU from it, a warning says so
        once.
      packing: the packed format of the gate, "twell" or "unions"; it matters for more than 64
        tokens. None takes unions from 1024 tokens on (2048 if D is at most 1024), and dense kernels
        for fewer.
      gradients: "dense" and None compute the backward by XLA, "sparse" on the unions of the
        forward, for more than 64 tokens. A number above 0 and at most 1 is sparse with so much
        memory, as a fraction of what the largest pattern takes: the capacity. "sparse" is 1, which
        holds any pattern, if x is finite. Less suffices if neither `FFNStats.union` nor
        `FFNStats.listed` is larger, on any device. Otherwise the gradients are computed densely:
        they are exact, but take longer than gradients without kernels (docs/performance.md), and
        `FFNStats.overflow` is 1. `twell_jax.ffn.RESIDUALS` names what the forward keeps, for
        policies of `jax.checkpoint`. Only the dense implementation supports forward-mode
        differentiation.
      windows: `twell_jax.ffn.Windows` of consecutive tokens, for which `FFNStats.lasso` is wanted;
        `[T]` or `[..., T]` are the leading axes of x. Dense XLA computes it; kernels do with
        sparse gradients, unless there are documents.
      residual: `[..., D]` in the dtype of x, to which the rounded y is added. Kernels of unions do
        it where they write y, if there are no gradients and the neurons are on one device; else it
        is as if the caller did.
      matmul_dtype: "float8" rounds the operands of the products that XLA computes to 8 bits, in
        both passes, with a scale for each array: e4m3, for gradients e5m2. Of kernels, those of
        unions round the operands of the gate's product, with a scale for each token and neuron, if
        D is a multiple of 128; its gradients are those of what is not rounded. It is for training;
        x must be bfloat16 or float32. None: the dtype of x.

    On a mesh the kernels of each device take its share of the tokens. If an axis is named "tensor",
    they take its share of the neurons too: shard the first axis of the weights over it. One
    all-reduce sums y, another the gradient of x. Weights that are sharded in another way are
    gathered. Explicit axes of the mesh that is set are left to XLA; y is then sharded as x, and the
    statistics are on every device. Under `vmap` the kernels run one call after the other; if
    nothing asks for kernels, XLA maps calls of fewer than 1024 tokens.

    Returns:
      y: `[..., D]` in the dtype of x, with the residual if there is one, and the `FFNStats`.
        Matmuls accumulate in float32, those of 8-bit operands by kernels in fewer bits
        (docs/design/0029-8-bit-weights.md). "xla" rounds g, u, h and y to the dtype of x; the
        kernels round g and y, with unions also h.

    Raises:
      TypeError: an argument has the name of an earlier version; the message says the new one.
      ValueError: shapes or dtypes do not agree, or an argument is out of its range.
      CannotServe: the implementation, packing or gradients asked for cannot serve this call; the
        message says why.

    Example:
      >>> x, w = jnp.ones((4, 8)), jnp.ones((32, 8))
      >>> y, stats = sparse_ffn(x, w, w, w)
      >>> y.shape, int(stats.max_nnz)
      ((4, 8), 32)
    """
    call: Call = checked(
        x, w_gate, w_up, w_down, biases, live, activation, implementation, packing, gradients,
        windows, residual, matmul_dtype,
    )  # fmt: skip
    request, weights = call.request, call.weights
    if live is not None:
        weights = replace(weights, live=jnp.asarray(live, jnp.int32)[None])

    def serve(
        tokens: tuple[jax.Array, jax.Array | None],
        weights: Weights,
        biases: Biases,
        windows: Windows | None,
    ) -> tuple[jax.Array, FFNStats]:
        x, residual = tokens
        selection = select(call)
        algorithm = selection.rule.algorithm
        if algorithm == "dense":
            remedies.warn(selection.case, request, x.dtype)
            return xla.ffn(
                x, weights, biases, activation=activation, windows=windows, residual=residual,
                in_8_bits=call.in_8_bits,
            )  # fmt: skip
        kernels, why = dispatch.back_end(_like_down(call))
        act = activations.rectifier(activation)
        assert kernels is not None and act is not None, why  # the rule would have been excluded
        rows, residual_rows = (a if a is None else a.reshape(-1, a.shape[-1]) for a in tokens)
        if algorithm == "unions" and request.capacity is not None:
            grid = windows and WindowGrid(x.shape[-2], windows.length)
            compute = mosaic.sparse_gradients(kernels, act, request.capacity, grid, call.in_8_bits)
            offset = () if windows is None else (windows.offset,)
            y, stats = compute(rows, weights, residual_rows, *offset)
        else:
            few_under_vmap = None if request.wants_kernels else dispatch.MANY_TOKENS
            compute = mosaic.dense_gradients(
                kernels, act, algorithm, few_under_vmap, call.in_8_bits
            )
            y, stats = compute(rows, weights, residual_rows)
        return y.reshape(x.shape), stats

    return partition.left_to_xla(serve, (call.x, call.residual), weights, call.biases, windows)


class Call(NamedTuple):
    """The arguments of `sparse_ffn`, checked; `weights.live` is as it was given.

    `in_8_bits` says whether `matmul_dtype` is "float8".
    """

    x: jax.Array
    weights: Weights
    biases: Biases
    residual: jax.Array | None
    activation: Activation
    windows: Windows | None
    request: Request
    in_8_bits: bool


def checked(
    x: Any, w_gate: Any, w_up: Any, w_down: Any, biases: Any, live: Any, activation: Any,
    implementation: Any, packing: Any, gradients: Any, windows: Any, residual: Any,
    matmul_dtype: Any,
) -> Call:  # fmt: skip
    """The `Call` of these arguments of `sparse_ffn`.

    Raises:
      ValueError: as `sparse_ffn` does.
    """
    request = _request(implementation, packing, gradients)
    x, residual = _array(x), _array(residual)
    weights = Weights(_array(w_gate), _array(w_up), _array(w_down), live)
    if not isinstance(biases, Biases | None):
        raise ValueError(
            f"biases must be Biases(gate, up, down) or None, got {type(biases).__name__}"
        )
    biases = Biases(*map(_array, biases or NO_BIASES))
    arguments.check_operands(x, weights, biases, residual)
    arguments.check_live(live, len(weights.down))
    arguments.check_windows(windows, x)
    arguments.check_activation(activation, weights.gate is not None)
    arguments.check_matmul_dtype(matmul_dtype, x, weights)
    in_8_bits = matmul_dtype is not None
    return Call(x, weights, biases, residual, activation, windows, request, in_8_bits)


def _request(implementation: Any, packing: Any, gradients: Any) -> Request:
    """What the caller asks for; the environment may name an implementation if the caller does not.

    Raises:
      ValueError: a name is unknown.
    """
    named_by = "implementation"
    if implementation is None and _VARIABLE in os.environ:
        named_by, implementation = _VARIABLE, os.environ[_VARIABLE]
    arguments.check_words(implementation, packing, named_by)
    arguments.check_gradients(gradients)
    return Request(implementation, packing, gradients, named_by)


def _array(operand: Any) -> Any:
    """As an array, or its shape and dtype, if only these are given."""
    if isinstance(operand, nnx.Variable):
        operand = operand.get_value()  # of a model of shapes no array
    if operand is None or isinstance(operand, Quantised | jax.ShapeDtypeStruct):
        return operand
    return jnp.asarray(operand)


def select(call: Call) -> Selection:
    """The rule for a call, where the current mesh is the one that kernels would see."""
    x, weights, windows = call.x, call.weights, call.windows
    kernels, no_back_end = dispatch.back_end(_like_down(call))
    named = {"gate": weights.gate, "up": weights.up, "down": weights.down}
    quantised = tuple(name for name, w in named.items() if isinstance(w, Quantised))
    in_8_bits = call.in_8_bits or bool(quantised)
    case = Case(
        tokens=x.size // x.shape[-1],
        width=x.shape[-1],
        neurons=len(weights.down),
        gated=weights.gate is not None,
        activation=call.activation,
        biases=any(b is not None for b in call.biases),
        quantised=quantised,
        live=weights.live is not None,
        sequence=None if windows is None else x.shape[-2],
        documents=windows is not None and windows.documents is not None,
        devices=partition.devices(),
        back_end=None if kernels is None else kernels.name,
        no_back_end=no_back_end,
        no_8_bits=kernels.no_8_bits() if kernels is not None and in_8_bits else None,
    )
    return dispatch.select(case, call.request, dispatch.measured_here(case, x.dtype))


def _like_down(call: Call) -> jax.ShapeDtypeStruct:
    """The shape of w_down in the dtype of x, also where it is `Quantised`."""
    return jax.ShapeDtypeStruct(call.weights.down.shape, call.x.dtype)

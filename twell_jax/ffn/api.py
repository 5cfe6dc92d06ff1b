"""The sparse feed-forward block as one operation: `sparse_ffn`.

    g = act(x w_gate^T)     u = x w_up^T     h = g * u     y = h w_down     (gated)
    h = act(x w_up^T)                                      y = h w_down     (non-gated)

With activation "drelu" h = relu(g) * relu(u).

Every weight is neuron-major, `[H, D]`: row n of `w_gate`, `w_up` and `w_down` belongs to neuron n,
so that y = sum_n h_n * w_down[n]. `xla.ffn` is the definition that all other implementations are
tested against; `dispatch` chooses which one serves a call.
"""

import inspect
import os
from dataclasses import replace
from typing import Any, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from pallas_kernels.quantised import E4M3, Quantised
from pallas_kernels.rectifiers import rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn import activations, dispatch, mosaic, partition, xla
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.dispatch import Case, Gradients, Implementation, Packing, Request, Selection
from twell_jax.ffn.lasso import Windows
from twell_jax.ffn.stats import FFNStats
from twell_jax.ffn.union_lasso import Cells
from twell_jax.ffn.xla import Biases

_VARIABLE = "TWELL_JAX_IMPLEMENTATION"  # for debugging; read when a function is traced
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


def sparse_ffn(
    x: ArrayLike,
    w_gate: ArrayLike | Quantised | None,
    w_up: ArrayLike | Quantised,
    w_down: ArrayLike | Quantised,
    *,
    b_gate: ArrayLike | None = None,
    b_up: ArrayLike | None = None,
    b_down: ArrayLike | None = None,
    live: ArrayLike | None = None,
    activation: Activation = "relu",
    threshold: float = 0.0,
    implementation: Implementation | None = None,
    packing: Packing | None = None,
    gradients: Gradients | None = None,
    expected_nnz: float | None = None,
    gradient_capacity: float = 1.0,
    windows: Windows | None = None,
    residual: ArrayLike | None = None,
) -> tuple[jax.Array, FFNStats]:
    """Feed-forward block whose activations are mostly zero (arXiv 2603.23198, section 3).

    Operands may be anything that `jnp.asarray` takes, such as NumPy arrays and `nnx.Param`s.

    Args:
      x: `[..., D]` tokens; bfloat16, float16 or float32.
      w_gate: `[H, D]`, or None for the non-gated block.
      w_up: `[H, D]`.
      w_down: `[H, D]`. Any of the three may be `Quantised`, w_down along axis -2. What it is
        multiplied with, x or h, is then quantised, too, a scale for each token; the product of the
        two is what the block means (`quantised.product`). The kernels for few
        tokens and unions compute it unless w_down is `Quantised`; else XLA does. There are no
        gradients for either.
      b_gate, b_up, b_down: optional biases, `[H]`, `[H]` and `[D]`.
      live: an integer from 0 to H, which may be on the device: neurons from this number on are
        taken as never firing, and their weights get gradients of zero. The kernels for few tokens
        and unions then leave out the gates of these neurons, in whole tiles; for fewer than 1024
        tokens they serve only if they are asked for. A larger number on the device is like H, a
        negative one like 0. None: any may fire.
      activation: "relu"; "relu2", its square; "fatrelu", z where z is above the threshold, else 0;
        "drelu", ReLU on both factors; or "silu" for the dense twin, which no kernel serves. The
        default takes kernels for "relu" alone.
      threshold: of "fatrelu", above 0.
      implementation: "xla" (dense, on any device) or "mosaic" (Pallas kernels, on Hopper GPUs).
        None takes what the environment variable TWELL_JAX_IMPLEMENTATION names. If it is not set,
        None takes the kernels where they are known to be faster; `explain` says why.
      packing: the packed format of the gate, "twell" or "unions"; it matters for more than 64
        tokens. None takes unions from 1024 tokens on, and dense kernels for fewer.
      gradients: "sparse" computes the backward on the unions of the forward, for more than 64
        tokens; "dense" and None compute it by XLA. Only the dense implementation supports
        forward-mode differentiation.
      expected_nnz: mean non-zeros per token, from 0 to H, if the caller has measured them (see
        `FFNStats.nnz`). They decide whether kernels serve few tokens and blocks without a gate.
      gradient_capacity: the memory for sparse gradients, above 0 and at most 1, as a fraction of
        what the largest pattern takes. 1 holds any pattern, if x is finite. Less suffices if
        neither `FFNStats.union` nor `FFNStats.listed` is larger, on any device. Otherwise the
        gradients are computed densely: they are exact, but take longer than gradients without
        kernels (docs/performance.md), and `FFNStats.overflow` is 1.
        `twell_jax.ffn.RESIDUALS` names what the forward keeps, for policies of `jax.checkpoint`.
      windows: `twell_jax.ffn.Windows` of consecutive tokens, for which `FFNStats.lasso` is wanted;
        `[T]` or `[..., T]` are the leading axes of x. Dense XLA computes it; kernels do with
        gradients="sparse", unless there are documents.
      residual: `[..., D]` in the dtype of x, to which the rounded y is added. Kernels of unions do
        it where they write y, if there are no gradients and the neurons are on one device; else it
        is as if the caller did.

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
      ValueError: shapes or dtypes do not agree, or an argument is out of its range.
      CannotServe: the implementation, packing or gradients asked for cannot serve this call; the
        message says why.

    Example:
      >>> x, w = jnp.ones((4, 8)), jnp.ones((32, 8))
      >>> y, stats = sparse_ffn(x, w, w, w)
      >>> y.shape, int(stats.max_nnz)
      ((4, 8), 32)
    """
    request = _request(implementation, packing, gradients)
    x = jnp.asarray(x)
    weights = Weights(*map(_array, (w_gate, w_up, w_down)))
    biases = Biases(*map(_array, (b_gate, b_up, b_down)))
    residual = _array(residual)
    _check_operands(x, weights, biases, residual)
    check_live(live, len(weights.down))
    if live is not None:
        weights = replace(weights, live=jnp.asarray(live, jnp.int32)[None])
    check_activation(activation, threshold, weights.gate is not None)
    check_options(len(weights.down), expected_nnz, gradient_capacity)

    def serve(
        tokens: tuple[jax.Array, jax.Array | None],
        weights: Weights,
        biases: Biases,
        windows: Windows | None,
    ) -> tuple[jax.Array, FFNStats]:
        x, residual = tokens
        selection = _select(x, weights, biases, activation, expected_nnz, request, windows)
        algorithm = selection.rule.algorithm
        if algorithm == "dense":
            return xla.ffn(
                x,
                weights,
                biases,
                activation=activation,
                threshold=threshold,
                windows=windows,
                residual=residual,
            )
        kernels, why = dispatch.back_end(weights.down)
        assert kernels is not None, why  # the rule would have been excluded
        rows, residual_rows = (a if a is None else a.reshape(-1, a.shape[-1]) for a in tokens)
        if algorithm == "unions" and gradients == "sparse":
            act = rectifier(activation, threshold)
            cells = windows and Cells(x.shape[-2], windows.length)
            compute = mosaic.sparse_gradients(kernels, act, gradient_capacity, cells)
            offset = () if windows is None else (windows.offset,)
            y, stats = compute(rows, weights, *offset)
            y = xla.add(residual_rows, y)
        else:
            few_under_vmap = None if request.wants_kernels else dispatch.MANY_TOKENS
            compute = mosaic.dense_gradients(
                kernels, activation, threshold, algorithm, few_under_vmap
            )
            y, stats = compute(rows, weights, residual_rows)
        return y.reshape(x.shape), stats

    return partition.left_to_xla(serve, (x, residual), weights, biases, windows)


def explain(*operands: Any, **options: Any) -> str:
    """Says which rule serves a call of `sparse_ffn`, and why the rules before it do not.

    Args:
      *operands: those of `sparse_ffn`; `jax.ShapeDtypeStruct`s suffice.
      **options: those of `sparse_ffn`.

    Raises:
      ValueError, CannotServe: as `sparse_ffn` does.

    Example:
      >>> x, w = (jax.ShapeDtypeStruct((n, 128), jnp.bfloat16) for n in (100, 512))
      >>> print(explain(x, w, w, w, implementation="xla").splitlines()[0])
      100 tokens on a device, 512 neurons, gated, expected_nnz unknown:
    """
    call = inspect.signature(sparse_ffn).bind(*operands, **options)
    call.apply_defaults()
    given = call.arguments
    x, activation, expected_nnz = given["x"], given["activation"], given["expected_nnz"]
    weights = Weights(*(given[name] for name in ("w_gate", "w_up", "w_down", "live")))
    biases = Biases(*(given[name] for name in ("b_gate", "b_up", "b_down")))
    request = _request(*(given[name] for name in ("implementation", "packing", "gradients")))
    _check_operands(x, weights, biases, given["residual"])
    check_live(weights.live, len(weights.down))
    check_activation(activation, given["threshold"], weights.gate is not None)
    check_options(len(weights.down), expected_nnz, given["gradient_capacity"])
    windows = given["windows"]
    return str(_select(x, weights, biases, activation, expected_nnz, request, windows))


def check_words(
    implementation: Any, packing: Any, gradients: Any, named_by: str = "implementation"
) -> None:
    """Raises ValueError if one of the words is unknown; `named_by` named the implementation."""
    for argument, value, choices in (
        (named_by, implementation, Implementation),
        ("packing", packing, Packing),
        ("gradients", gradients, Gradients),
    ):
        if value is not None and value not in get_args(choices):
            names = ", ".join(map(repr, get_args(choices)))
            raise ValueError(f"{argument} must be {names} or None, got {value!r}")


def check_activation(activation: Any, threshold: Any, gated: bool) -> None:
    """Raises ValueError if there is no block with this activation."""
    if problem := activations.problem(activation, threshold, gated):
        raise ValueError(f"activation {problem}")


def check_options(h: int, expected_nnz: float | None, gradient_capacity: float) -> None:
    """Raises ValueError if one of these cannot be had for H neurons."""
    if expected_nnz is not None and not 0 <= expected_nnz <= h:
        raise ValueError(f"expected_nnz must be from 0 to {h}, got {expected_nnz}")
    if not 0 < gradient_capacity <= 1:
        raise ValueError(
            f"gradient_capacity must be above 0 and at most 1, got {gradient_capacity}"
        )


def check_live(live: Any, h: int) -> None:
    """Raises ValueError if `live` is no number of live neurons among H; one on the device is not
    read."""
    if live is None:
        return
    number = live if hasattr(live, "shape") else np.asarray(live)
    if number.shape or not jnp.issubdtype(number.dtype, jnp.integer):
        raise ValueError(f"live must be one integer, got {number.dtype} {list(number.shape)}")
    if isinstance(live, int | np.integer | np.ndarray) and not 0 <= live <= h:
        raise ValueError(f"live must be from 0 to {h}, got {live}")


def check_dtype(name: str, dtype: Any) -> None:
    """Raises ValueError unless the block can be computed in `dtype`; `name` is what has it."""
    try:
        is_known = jnp.dtype(dtype) in _DTYPES
    except TypeError:
        is_known = False
    if not is_known:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        raise ValueError(f"{name} must be one of {names}, got {dtype}")


def _request(implementation: Any, packing: Any, gradients: Any) -> Request:
    """What the caller asks for; the environment may name an implementation if the caller does not.

    Raises:
      ValueError: a name is unknown.
    """
    named_by = "implementation"
    if implementation is None and _VARIABLE in os.environ:
        named_by, implementation = _VARIABLE, os.environ[_VARIABLE]
    check_words(implementation, packing, gradients, named_by)
    return Request(implementation, packing, gradients, named_by)


def _array(operand: Any) -> Any:
    return operand if operand is None or isinstance(operand, Quantised) else jnp.asarray(operand)


def _select(
    x: jax.Array,
    weights: Weights,
    biases: Biases,
    activation: Activation,
    expected_nnz: float | None,
    request: Request,
    windows: Windows | None,
) -> Selection:
    """The rule for these operands."""
    kernels, unsupported = dispatch.back_end(weights.down)
    tokens, neurons = x.size // x.shape[-1], len(weights.down)
    is_quantised = any(isinstance(w, Quantised) for w in weights.inner)
    if rectifier(activation, 0.0) is None:
        unsupported = f"the activation must be zero for most neurons, got {activation}"
    elif any(b is not None for b in biases):
        unsupported = "the kernels add no biases"
    elif isinstance(weights.down, Quantised):
        unsupported = "the kernels take no Quantised w_down"
    elif is_quantised and x.shape[-1] % 128:
        unsupported = "the kernels take Quantised weights only with D a multiple of 128"
    elif windows is not None and windows.documents is not None:
        unsupported = "the kernels compute no lasso over windows of documents"
    here = max(1, tokens // partition.devices()[0])  # where they do not divide, XLA pads
    if windows is not None and here % x.shape[-2]:
        unsupported = unsupported or "a device would have parts of the windows of a sequence"
    case = Case(
        tokens=here,
        neurons=neurons,
        gated=weights.gate is not None,
        back_end=kernels and kernels.name,
        expected_nnz=expected_nnz,
        unsupported=unsupported or partition.unsupported(tokens, neurons),
        has_live=weights.live is not None,
        lasso=windows is not None,
        quantised=is_quantised,
    )
    return dispatch.select(case, request)


def _check_operands(x, weights, biases, residual):
    check_dtype("x", x.dtype)
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"x must be [..., D] with at least one token, got {list(x.shape)}")
    if weights.gate is None and biases.gate is not None:
        raise ValueError("b_gate was given, but the block has no w_gate")
    if residual is not None and (residual.shape != x.shape or residual.dtype != x.dtype):
        raise ValueError(
            f"residual must be as x, {x.dtype} {list(x.shape)}, got {residual.dtype} "
            f"{list(residual.shape)}; leave it out and add y to it"
        )
    for name, w in (("w_up", weights.up), ("w_down", weights.down)):
        if w is None:
            raise ValueError(f"{name} is required, got None")
    d, w_down = x.shape[-1], weights.down
    if w_down.ndim != 2 or w_down.shape[1] != d:
        raise ValueError(
            f"w_down must be [H, {d}] (neuron-major: D={d} by x), got {list(w_down.shape)}"
        )
    h = w_down.shape[0]
    for name, array, shape in (
        ("w_gate", weights.gate, (h, d)),
        ("w_up", weights.up, (h, d)),
        ("w_down", weights.down, (h, d)),
        ("b_gate", biases.gate, (h,)),
        ("b_up", biases.up, (h,)),
        ("b_down", biases.down, (d,)),
    ):
        if array is None:
            continue
        if array.shape != shape:
            raise ValueError(
                f"{name} must be {list(shape)} (neuron-major: H={h} by w_down, D={d} by x), "
                f"got {list(array.shape)}"
            )
        if isinstance(array, Quantised):
            _check_quantised(name, array)
        elif array.dtype != x.dtype:
            raise ValueError(f"{name} must have the dtype of x, {x.dtype}, got {array.dtype}")


def _check_quantised(name: str, w: Quantised) -> None:
    scales = (1, w.shape[1]) if name == "w_down" else (w.shape[0], 1)
    if w.dtype != E4M3 or w.scale.shape != scales or w.scale.dtype != jnp.float32:
        axis = ", axis=-2" if name == "w_down" else ""
        raise ValueError(
            f"{name} must have float8_e4m3fn values and float32 scales {list(scales)}, as "
            f"quantise({name}{axis}) makes them, got {w.dtype}, and {w.scale.dtype} "
            f"{list(w.scale.shape)}"
        )

"""The sparse feed-forward block as one operation: `sparse_ffn`.

    g = act(x w_gate^T)     u = x w_up^T     h = g * u     y = h w_down     (gated)
    h = act(x w_up^T)                                      y = h w_down     (non-gated)

Every weight is neuron-major, `[H, D]`: row n of `w_gate`, `w_up` and `w_down` belongs to neuron n,
so that y = sum_n h_n * w_down[n]. `ffn_xla` is the definition that every other implementation is
tested against.
"""

import functools
import os
from typing import Literal, get_args

import jax
import jax.numpy as jnp

from twell_jax.ffn import mosaic as ffn_mosaic
from twell_jax.ffn import xla as ffn_xla
from twell_jax.ffn.xla import ACTIVATIONS, Activation, FFNStats

Implementation = Literal["xla", "mosaic", "twell", "unions"]

_IMPLEMENTATIONS = get_args(Implementation)
_VARIABLE = "TWELL_JAX_IMPLEMENTATION"  # for debugging; read when a function is traced
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


class CannotServe(ValueError):
    """The implementation that was asked for cannot serve these inputs on this machine."""


def sparse_ffn(
    x: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    b_gate: jax.Array | None = None,
    b_up: jax.Array | None = None,
    b_down: jax.Array | None = None,
    activation: Activation = "relu",
    implementation: Implementation | None = None,
    expected_nnz: float | None = None,
    gradient_capacity: float = 0.5,
) -> tuple[jax.Array, FFNStats]:
    """Feed-forward block whose activations are mostly zero (arXiv 2603.23198, section 3).

    Args:
      x: `[..., D]` tokens; bfloat16, float16 or float32.
      w_gate: `[H, D]`, or None for the non-gated block.
      w_up: `[H, D]`.
      w_down: `[H, D]`.
      b_gate, b_up, b_down: optional biases, `[H]`, `[H]` and `[D]`.
      activation: "relu", or "silu" for the dense twin.
      implementation: "xla" (dense), "mosaic" (Pallas kernels for Hopper GPUs), "twell" or "unions"
        ("mosaic" with this packed format of the gate, for more than 64 tokens; "mosaic" takes
        unions from 1024 tokens on), or None for what the environment variable
        TWELL_JAX_IMPLEMENTATION names or, without it, what is faster here: the kernels for up to 64
        tokens, which takes sparse activations, and with a gate from 1024 tokens on, where dense
        ones cost a few percent (docs/performance.md). Gradients are sparse behind unions that were
        asked for by name, "mosaic" included, and else dense. Only "xla" has forward-mode ones.
      expected_nnz: non-zeros per token, from 0 to H, if the caller has measured them, as
        `FFNStats.nnz`. implementation=None then takes the kernels only where they win: up to 5 % of
        H for 32 tokens, 2 % for 33 to 64; and also for 1024 tokens and more without a gate, up to
        1 %.
      gradient_capacity: the memory that sparse gradients get, from 0 to 1, as a fraction of what
        they would take densely. It suffices if 256 tokens use no more of the neurons between them,
        and tokens no more of their blocks of 64. If it does not, the gradients are dense: exact,
        slower than without the kernels, and reported as `FFNStats.overflow`. To policies of
        `jax.checkpoint` all of it is named "sparse_ffn".

    On a mesh (of automatic axes) each device's kernels take its share of the tokens and, if an axis
    is named "tensor", of the neurons: give the weights that axis first. The shares of y, and of the
    gradient of x, are added up by one all-reduce; other weights than those shares are gathered.
    Under `vmap` the kernels are called in turn; None takes "xla" for calls of few tokens.

    Returns:
      y: `[..., D]` in the dtype of x, and the `FFNStats`. Matmuls accumulate in float32; "xla"
        rounds g, u, h and y to the dtype of x, the kernels g and y, and with unions h.

    Raises:
      ValueError: shapes or dtypes do not agree, or a number is out of its range.
      CannotServe: `implementation` cannot serve them here; the message says why.

    Example:
      >>> x, w = jnp.ones((4, 8)), jnp.ones((32, 8))
      >>> y, stats = sparse_ffn(x, w, w, w)
      >>> y.shape, int(stats.max_nnz)
      ((4, 8), 32)
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    biases = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    _check(x, weights, biases, activation)
    if expected_nnz is not None and not 0 <= expected_nnz <= len(w_down):
        raise ValueError(f"expected_nnz must be from 0 to {len(w_down)}, got {expected_nnz}")
    if not 0 < gradient_capacity <= 1:
        raise ValueError(
            f"gradient_capacity must be above 0 and at most 1, got {gradient_capacity}"
        )
    source = "implementation"
    if implementation is None and _VARIABLE in os.environ:
        source, implementation = _VARIABLE, os.environ[_VARIABLE]
    if implementation is not None and implementation not in _IMPLEMENTATIONS:
        names = ", ".join(map(repr, _IMPLEMENTATIONS))
        raise ValueError(f"{source} must be {names} or None, got {implementation!r}")
    dense = functools.partial(ffn_xla.ffn, x, **weights, **biases, activation=activation)
    if implementation == "xla":
        return dense()
    kernels = functools.partial(ffn_mosaic.ffn, x, **weights, gradient_capacity=gradient_capacity)
    obstacle = ffn_mosaic.obstacle(x, **weights, **biases, activation=activation)
    if implementation is not None:
        if obstacle:
            raise CannotServe(f"{source}={implementation!r} cannot serve: {obstacle}")
        form = None if implementation == "mosaic" else implementation
        return kernels(form=form, anywhere=False)
    if not obstacle and ffn_mosaic.is_faster(x, w_gate, w_down, expected_nnz):
        return kernels(form=None, anywhere=True)
    return dense()


def _check(x, weights, biases, activation):
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(ACTIVATIONS)}, got {activation!r}")
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        raise ValueError(f"x must be one of {names}, got {x.dtype}")
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"x must be [..., D] with at least one token, got {list(x.shape)}")
    if weights["w_gate"] is None and biases["b_gate"] is not None:
        raise ValueError("b_gate was given, but the block has no w_gate")
    for name in ("w_up", "w_down"):
        if weights[name] is None:
            raise ValueError(f"{name} is required, got None")
    d, w_down = x.shape[-1], weights["w_down"]
    if w_down.ndim != 2 or w_down.shape[1] != d:
        raise ValueError(
            f"w_down must be [H, {d}] (neuron-major: D={d} by x), got {list(w_down.shape)}"
        )
    h = w_down.shape[0]
    shapes = {name: (h, d) for name in weights} | {"b_gate": (h,), "b_up": (h,), "b_down": (d,)}
    for name, array in (weights | biases).items():
        if array is None:
            continue
        if array.shape != shapes[name]:
            raise ValueError(
                f"{name} must be {list(shapes[name])} (neuron-major: H={h} by w_down, D={d} by x), "
                f"got {list(array.shape)}"
            )
        if array.dtype != x.dtype:
            raise ValueError(f"{name} must have the dtype of x, {x.dtype}, got {array.dtype}")

"""The sparse feed-forward block as one operation: `sparse_ffn`.

    g = act(x w_gate^T)     u = x w_up^T     h = g * u     y = h w_down     (gated)
    h = act(x w_up^T)                                      y = h w_down     (non-gated)

Every weight is neuron-major, `[H, D]`: row n of `w_gate`, `w_up` and `w_down` belongs to neuron n,
so that y = sum_n h_n * w_down[n]. `_xla` below is the definition that every other implementation is
tested against.
"""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["relu", "silu"]
Implementation = Literal["xla", "mosaic"]

_ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu}
_DTYPES = (jnp.bfloat16, jnp.float16, jnp.float32)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FFNStats:
    """What the hidden units did, over all tokens of one call.

    Attributes:
      l1: float32 [], mean over tokens of sum_n |h_n|; differentiable (arXiv 2603.23198, recipe).
      nnz: float32 [], mean over tokens of the number of non-zero activations (of g, if gated).
      max_nnz: int32 [], the largest number of non-zero activations of any token.
      fired: bool [H], whether a neuron was non-zero for any token.
    """

    l1: jax.Array
    nnz: jax.Array
    max_nnz: jax.Array
    fired: jax.Array


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
) -> tuple[jax.Array, FFNStats]:
    """Feed-forward block whose activations are mostly zero (arXiv 2603.23198, section 3).

    Args:
      x: `[..., D]` tokens; bfloat16, float16 or float32.
      w_gate: `[H, D]`, or None for the non-gated block.
      w_up: `[H, D]`.
      w_down: `[H, D]`.
      b_gate, b_up, b_down: optional biases, `[H]`, `[H]` and `[D]`.
      activation: "relu", or "silu" for the dense twin.
      implementation: "xla" (dense), "mosaic" (Pallas kernels for Hopper GPUs), or None for the
        fastest that can serve these inputs on this machine.

    Returns:
      y: `[..., D]` in the dtype of x, and the `FFNStats`. Matmuls accumulate in float32; g, u, h
      and y are each rounded once to the dtype of x.

    Raises:
      ValueError: shapes or dtypes do not agree, or `implementation` cannot serve them here.

    Example:
      >>> x, w = jnp.ones((4, 8)), jnp.ones((32, 8))
      >>> y, stats = sparse_ffn(x, w, w, w)
      >>> y.shape, int(stats.max_nnz)
      ((4, 8), 32)
    """
    weights = {"w_gate": w_gate, "w_up": w_up, "w_down": w_down}
    biases = {"b_gate": b_gate, "b_up": b_up, "b_down": b_down}
    _check(x, weights, biases, activation)
    if implementation not in ("xla", "mosaic", None):
        raise ValueError(f"implementation must be 'xla', 'mosaic' or None, got {implementation!r}")
    if implementation == "mosaic":
        raise ValueError("implementation='mosaic' cannot serve: its kernels are not there yet")
    return _xla(x, **weights, **biases, activation=activation)


def _xla(x, *, w_gate, w_up, w_down, b_gate, b_up, b_down, activation):
    act = _ACTIVATIONS[activation]
    up = _affine(x, w_up, b_up)
    active = act(up) if w_gate is None else act(_affine(x, w_gate, b_gate))
    h = active if w_gate is None else active * up
    # XLA rounds a product of 16-bit matrices once, from float32. To ask for that explicitly, by
    # preferred_element_type, would turn the gradients' matmuls into slow float32 ones on GPUs.
    y = h @ w_down
    return (y if b_down is None else y + b_down), _stats(h, active)


def _affine(x, w, b):
    product = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))
    return product if b is None else product + b


def _stats(h: jax.Array, active: jax.Array) -> FFNStats:
    tokens = tuple(range(h.ndim - 1))
    nonzero = active != 0
    nnz = jnp.sum(nonzero, axis=-1, dtype=jnp.int32)
    return FFNStats(
        l1=jnp.mean(jnp.sum(jnp.abs(h), axis=-1, dtype=jnp.float32)),
        nnz=jnp.mean(nnz, dtype=jnp.float32),
        max_nnz=jnp.max(nnz),
        fired=jnp.any(nonzero, axis=tokens),
    )


def _check(x, weights, biases, activation):
    if activation not in _ACTIVATIONS:
        raise ValueError(f"activation must be one of {list(_ACTIVATIONS)}, got {activation!r}")
    if x.dtype not in _DTYPES:
        names = ", ".join(jnp.dtype(d).name for d in _DTYPES)
        raise ValueError(f"x must be one of {names}, got {x.dtype}")
    if x.ndim < 1 or 0 in x.shape:
        raise ValueError(f"x must be [..., D] with at least one token, got {list(x.shape)}")
    if weights["w_gate"] is None and biases["b_gate"] is not None:
        raise ValueError("b_gate was given, but the block has no w_gate")
    d, h = x.shape[-1], weights["w_down"].shape[0]
    shapes = {name: (h, d) for name in weights} | {"b_gate": (h,), "b_up": (h,), "b_down": (d,)}
    for name, array in (weights | biases).items():
        if array is None and name not in ("w_up", "w_down"):
            continue
        if array.shape != shapes[name]:
            raise ValueError(
                f"{name} must be {list(shapes[name])} (neuron-major: H={h} by w_down, D={d} by x), "
                f"got {list(array.shape)}"
            )
        if array.dtype != x.dtype:
            raise ValueError(f"{name} must have the dtype of x, {x.dtype}, got {array.dtype}")

"""The meaning of the sparse feed-forward block, in dense JAX, and the statistics it returns."""

from dataclasses import dataclass
from typing import Literal

import jax
import jax.numpy as jnp

Activation = Literal["relu", "silu"]
ACTIVATIONS = {"relu": jax.nn.relu, "silu": jax.nn.silu}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class FFNStats:
    """What the hidden units did, over all tokens of one call.

    Attributes:
      l1: float32 [], mean over tokens of sum_n |h_n|; differentiable (arXiv 2603.23198, recipe).
      nnz: float32 [], mean over tokens of the number of non-zero activations (of g, if gated).
      max_nnz: int32 [], the largest number of non-zero activations of any token.
      fired: bool [H], whether a neuron was non-zero for any token.
      overflow: float32 [], 1 if sparse gradients were asked for, but what they need exceeded its
        room, so that they are computed densely; else 0.
    """

    l1: jax.Array
    nnz: jax.Array
    max_nnz: jax.Array
    fired: jax.Array
    overflow: jax.Array


def ffn(
    x, w_gate, w_up, w_down, *, b_gate=None, b_up=None, b_down=None, activation: Activation = "relu"
) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` without its checks."""
    act = ACTIVATIONS[activation]
    up = _affine(x, w_up, b_up)
    active = act(up) if w_gate is None else act(_affine(x, w_gate, b_gate))
    h = active if w_gate is None else active * up
    # XLA rounds a product of 16-bit matrices once, from float32. To ask for that explicitly, by
    # preferred_element_type, would turn the gradients' matmuls into float32 ones, which doubled the
    # time of forward and backward on an H100.
    y = h @ w_down
    return (y if b_down is None else y + b_down), _stats(h, active)


def _affine(x, w, b):
    product = jax.lax.dot_general(x, w, (((x.ndim - 1,), (1,)), ((), ())))
    return product if b is None else product + b


def _stats(h: jax.Array, active: jax.Array) -> FFNStats:
    nonzero = active != 0
    nnz = jnp.sum(nonzero, axis=-1, dtype=jnp.int32)
    return FFNStats(
        l1=jnp.mean(jnp.sum(jnp.abs(h), axis=-1, dtype=jnp.float32)),
        nnz=jnp.mean(nnz, dtype=jnp.float32),
        max_nnz=jnp.max(nnz),
        fired=jnp.any(nonzero, axis=tuple(range(h.ndim - 1))),
        overflow=jnp.zeros((), jnp.float32),
    )

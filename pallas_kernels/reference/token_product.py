"""Meaning of the products of `pallas_kernels.hopper.token_product`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.quantised import Operand, Quantised, rounded, times
from pallas_kernels.layouts.rectifiers import RELU, Rectifier
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.weights import only_live


def project(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    k_axis: int,
    eps: float,
    bias: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
    """Rounds once, at the end."""
    y = jnp.concatenate([_product(stream.scaled, w, layer, k_axis) for w in weights], axis=1)
    y *= stream.inverse_rms(eps)
    if bias is not None:
        y += bias[layer[0]].astype(jnp.float32)
    return y.astype(dtype or stream.x.dtype)


def hidden(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    eps: float,
    rectifier: Rectifier | None,
    live: jax.Array | None = None,
) -> jax.Array:
    """Rounds once, at the end."""
    inverse_rms = stream.inverse_rms(eps)
    g, *up = (_product(stream.scaled, w, layer, 2) * inverse_rms for w in weights)
    h = jax.nn.silu(g) if rectifier is None else rectifier.gate(g, stream.x.dtype)
    for u in up:
        h *= u if rectifier is None else rectifier.linear(u)
    return _of_live(h, live, layer).astype(stream.x.dtype)


def gate(
    x: jax.Array,
    weight: Operand,
    layer: jax.Array,
    counts: jax.Ref,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    norm: tuple[jax.Array, float] | None = None,
    prefetch: tuple[Operand, ...] = (),
    live: jax.Array | None = None,
) -> jax.Array:
    """Padding is zero."""
    del prefetch  # which concerns speed alone
    before = _product(x, weight, layer, 2)
    if norm is not None:
        squares, eps = norm
        before *= jax.lax.rsqrt(jnp.sum(squares, axis=1, keepdims=True) / x.shape[1] + eps)
    g = jnp.where(before == -jnp.inf, -0.0, rectifier.gate(before, x.dtype)).astype(x.dtype)
    g = _of_live(jnp.where((jnp.arange(len(x)) < batch)[:, None], g, 0), live, layer)
    here = layer[0], 0, slice(None, -1)
    counts[here] = counts[here] + jnp.sum(g != 0, axis=1, dtype=jnp.int32)
    return g


def add_product(
    h: jax.Array,
    weight: Operand,
    layer: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    *,
    bias: jax.Array | None = None,
) -> Stream:
    """Rounds the sum of product and stream once."""
    y = x.astype(jnp.float32) + _product(h, weight, layer, 1)
    if bias is not None:
        y += bias[layer[0]].astype(jnp.float32)
    return Stream.of(y.astype(x.dtype), scale[layer[0]])


def _of_live(values, live, layer):
    return only_live(values, None if live is None else live[layer])


def _product(x, w, layer, k_axis):
    if isinstance(w, Quantised):
        return times(rounded(x), jax.tree.map(lambda a: a[layer[0]], w))
    return jnp.einsum(
        "mk,kn->mn" if k_axis == 1 else "mk,nk->mn",
        x,
        w[layer[0]],
        preferred_element_type=jnp.float32,
        precision="highest",
    )

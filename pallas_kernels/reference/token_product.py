"""Meaning of the products of `pallas_kernels.hopper.decode.token_product`."""

import jax
import jax.numpy as jnp

from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Operand, Quantised, rounded, times
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import only_live


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
    y = jnp.concatenate([product(stream.scaled, w, layer, k_axis) for w in weights], axis=1)
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
    g, *up = (product(stream.scaled, w, layer, 2) * inverse_rms for w in weights)
    h = jax.nn.silu(g) if rectifier is None else rectifier.gate(g, stream.x.dtype)
    for u in up:
        h *= u if rectifier is None else rectifier.linear(u)
    return of_live(h, live, layer).astype(stream.x.dtype)


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
    y = x.astype(jnp.float32) + product(h, weight, layer, 1)
    if bias is not None:
        y += bias[layer[0]].astype(jnp.float32)
    # XLA drops a conversion that is taken back: `squares` would be of a sum that was not rounded.
    dtype = jnp.finfo(x.dtype)
    rounded_once = jax.lax.reduce_precision(y, dtype.nexp, dtype.nmant)
    return Stream.of(rounded_once.astype(x.dtype), scale[layer[0]])


def of_live(values: jax.Array, live: jax.Array | None, layer: jax.Array) -> jax.Array:
    """`only_live` with the number of a layer; `live: int32 [layers]`."""
    return only_live(values, None if live is None else live[layer])


def product(x: jax.Array, w: Operand, layer: jax.Array, k_axis: int) -> jax.Array:
    """The product of `x: [M, K]` with a layer's matrix, float32 `[M, N]`; see `project`."""
    if isinstance(w, Quantised):
        return times(rounded(x), jax.tree.map(lambda a: a[layer[0]], w))
    return jnp.einsum(
        "mk,kn->mn" if k_axis == 1 else "mk,nk->mn",
        x,
        w[layer[0]],
        preferred_element_type=jnp.float32,
        precision="highest",
    )

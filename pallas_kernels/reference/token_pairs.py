"""Meaning of the pairs of `pallas_kernels.hopper.decode.token_pairs`."""

import jax

from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.reference.decode_attention import decode_attention
from pallas_kernels.reference.token_gate import gate
from pallas_kernels.reference.token_product import add_product, hidden, project
from pallas_kernels.weights import Weights


def project_attend(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    k_cache: jax.Ref,
    v_cache: jax.Ref,
    length: jax.Array,
    padding: jax.Array,
    counts: jax.Ref,
    *,
    heads: int,
    kv_heads: int,
    k_axis: int,
    eps: float,
    bias: jax.Array | None = None,
) -> jax.Array:
    """One after the other."""
    del counts
    qkv = project(stream, weights, layer, k_axis=k_axis, eps=eps, bias=bias)
    rest = k_cache, v_cache, layer, length, padding
    return decode_attention(qkv, rope, *rest, heads=heads, kv_heads=kv_heads)


def add_product_gate(
    h: jax.Array,
    weight: Operand,
    layer: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    mlp: Weights,
    counts: jax.Ref,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    eps: float,
    bias: jax.Array | None = None,
) -> tuple[Stream, Gate]:
    """One after the other."""
    stream = add_product(h, weight, layer, x, scale, bias=bias)
    norm = stream.squares, eps
    return stream, gate(stream.scaled, mlp, layer, counts, rectifier, batch=batch, norm=norm)


def add_product_hidden(
    h: jax.Array,
    weight: Operand,
    layer: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    inner: tuple[Operand, ...],
    counts: jax.Ref,
    *,
    eps: float,
    rectifier: Rectifier | None,
    live: jax.Array | None = None,
    bias: jax.Array | None = None,
) -> tuple[Stream, jax.Array]:
    """One after the other."""
    del counts
    stream = add_product(h, weight, layer, x, scale, bias=bias)
    return stream, hidden(stream, inner, layer, eps=eps, rectifier=rectifier, live=live)

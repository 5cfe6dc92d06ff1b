"""Two decoding kernels in one launch instead of two (`launch`)."""

from typing import Any

import jax

from pallas_kernels.hopper.decode.active_counts import Launch
from pallas_kernels.hopper.decode.decode_attention import decode_attention_phase
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.hopper.decode.launch import Arrivals, Phase, launch
from pallas_kernels.hopper.decode.token_gate import gate_phase
from pallas_kernels.hopper.decode.token_product import (
    add_product_phase,
    hidden_phase,
    project_phase,
)
from pallas_kernels.hopper.decode.token_ring import PARTS, clusters_at_once, fitting
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights


def project_attend(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    k_cache: jax.Ref,
    v_cache: jax.Ref,
    lengths: jax.Array,
    counts: jax.Ref,
    *,
    heads: int,
    kv_heads: int,
    k_axis: int,
    eps: float,
    bias: jax.Array | None = None,
) -> jax.Array:
    """`token_product.project`, and `decode_attention` of the result.

    They are launched apart if a cluster of attention has fewer than four thread blocks, as it has
    for many sequences and for short caches, or if in one launch not all of the projection's would
    be on the GPU at once. Kernels just before may still run when it starts: they may not write what
    it reads before it waits for them, `weights`, `layer`, `lengths` and this layer of the
    cache.

    Args:
      stream, weights, layer, k_axis, eps, bias: of `project`.
      rope, k_cache, v_cache, lengths, heads, kv_heads: of `decode_attention`.
      counts: as in `hopper.decode.active_counts`; counts the blocks that are done.

    Returns:
      What `decode_attention` returns.

    Raises:
      ValueError: if a shape or dtype is not as `decode_attention` needs it.
    """

    def attention(qkv: Any) -> Phase[jax.Array]:
        return decode_attention_phase(
            qkv, rope, k_cache, v_cache, layer, lengths, heads=heads, kv_heads=kv_heads
        )

    first = project_phase(stream, weights, layer, k_axis=k_axis, eps=eps, bias=bias)
    second = attention(*first.outs)
    subclusters, parts = second.cluster
    if parts == PARTS and first.clusters % subclusters == 0:
        on_sm = min(fitting(first.memory), fitting(second.memory))
        if first.clusters // subclusters <= clusters_at_once(on_sm, subclusters * parts):
            first = first.in_clusters(second.cluster)
            return _together(first, second, counts, layer, Launch.ATTENTION)[1]
    (qkv,) = launch(first)
    return launch(attention(qkv))[0]


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
    """`token_product.add_product`, and `token_gate.gate` of the normed result.

    Args:
      h, weight, layer, x, scale, bias: of `add_product`.
      mlp, counts, rectifier, batch: of `gate`, the weights among them.
      eps: of the norm.

    Returns:
      What `add_product` and `gate` return.
    """
    first = add_product_phase(h, weight, layer, x, scale, bias=bias)
    stream = first.form(*first.outs)
    assert stream.squares is not None
    norm = stream.squares, eps
    second = gate_phase(stream.scaled, mlp, layer, counts, rectifier, batch=batch, norm=norm)
    stream, gate = _together(first, second, counts, layer, Launch.GATE)
    return stream, gate


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
    """`token_product.add_product`, and `hidden` of the result.

    Args:
      h, weight, layer, x, scale, bias: of `add_product`.
      inner, eps, rectifier, live: of `hidden`, the weights among them.
      counts: as in `hopper.decode.active_counts`; counts the blocks that are done.

    Returns:
      What `add_product` and `hidden` return.
    """
    first = add_product_phase(h, weight, layer, x, scale, bias=bias)
    stream = first.form(*first.outs)
    second = hidden_phase(stream, inner, layer, eps=eps, rectifier=rectifier, live=live)
    stream, hidden = _together(first, second, counts, layer, Launch.GATE)
    return stream, hidden


def _together(first, second, counts, layer, which):
    return launch(first, second, arrivals=Arrivals(counts, layer, which))

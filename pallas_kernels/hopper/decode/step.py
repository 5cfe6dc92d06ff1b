"""The layers of a decoding step: launches for all of them, each for a part of the sequences, or a
chain of launches for all sequences, each made while the one before still runs.

In the chain a layer has three: query, key and value projections with attention, which also rotates
and appends (in many cases two launches, `token_pairs`); the output projection with the gate; and
the rest of the feed-forward block. Norms and residuals are part of the products (`layouts.stream`).
Kernels take the stacked weights of all layers and a layer's number, so nothing is copied. The
layers are unrolled, as a loop's own kernels would come between.
"""

from functools import partial

import jax
import numpy as np

from pallas_kernels import in_place
from pallas_kernels.hopper.decode import active_counts, token_ffn, token_pairs, token_product
from pallas_kernels.hopper.decode.one_launch import call
from pallas_kernels.layers import Layers
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Cache, Quantised
from pallas_kernels.rectifiers import Rectifier


def decode_layers(
    stream: Stream,
    layers: Layers,
    k_cache: Cache,
    v_cache: Cache,
    lengths: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    *,
    heads: int,
    kv_heads: int,
    eps: float,
    rectifier: Rectifier | None,
    is_sparse: bool,
    launches: int,
    window: int | None = None,
    residual_scale: float = 1.0,
) -> Stream:
    """All layers for one new token of each of B sequences.

    Args:
      stream: of the tokens, M of them: B rounded up to a multiple of 8, at most 64; D a multiple of
        1024.
      layers: their weights; widths are multiples of 256.
      k_cache, v_cache, lengths, rope, heads, kv_heads: as of
        `decode_attention.decode_attention`.
      eps: of the norms.
      rectifier: the activation of the feed-forward blocks; None for SiLU.
      is_sparse: whether the blocks skip neurons that are not active; without, they are dense.
      launches, window, residual_scale: as of `DecodeKernels.decode_layers`; a chain has no layer
        norms, norms of heads, windows shorter than the cache, scales but 1, biases of feed-forward
        blocks and other widths (`one_launch.call`).

    Returns:
      The stream in front of the norm that follows the last layer.
    """
    options = dict(
        heads=heads, kv_heads=kv_heads, eps=eps, rectifier=rectifier, is_sparse=is_sparse
    )
    if launches:
        return call.decode_layers(
            stream, layers, k_cache, v_cache, lengths, rope, launches=launches, window=window,
            residual_scale=residual_scale, **options,
        )  # fmt: skip
    assert residual_scale == 1 and (window or k_cache.shape[2]) >= k_cache.shape[2]
    assert not isinstance(k_cache, Quantised) and not isinstance(v_cache, Quantised)
    assert layers.head_scales is layers.norm_biases is layers.inner_biases is layers.down_bias
    number_of_layers, h, _ = layers.mlp.down.shape
    counts = in_place.mutable(active_counts.zeros(number_of_layers, len(stream.x), h))
    for number in np.arange(number_of_layers, dtype=np.int32)[:, None]:
        stream = _layer(stream, layers, number, k_cache, v_cache, counts, lengths, rope, **options)
    return stream


# Traced once for all layers.
@partial(jax.jit, static_argnames=("heads", "kv_heads", "eps", "rectifier", "is_sparse"))
def _layer(
    stream, layers, number, k, v, counts, lengths, rope,
    *, heads, kv_heads, eps, rectifier, is_sparse,
):  # fmt: skip
    batch, mlp = len(lengths), layers.mlp
    k_axis = 2 if isinstance(layers.qkv[0], Quantised) else 1
    projection = dict(k_axis=k_axis, eps=eps, bias=layers.qkv_bias)
    attended = token_pairs.project_attend(
        stream, layers.qkv, number, rope, k, v, lengths, counts,
        heads=heads, kv_heads=kv_heads, **projection,
    )  # fmt: skip
    before, after = layers.scales
    out, options = (layers.out, number, stream.x, before), dict(eps=eps, bias=layers.out_bias)
    if not is_sparse:
        options |= dict(rectifier=rectifier, live=mlp.live)
        stream, h = token_pairs.add_product_hidden(attended, *out, mlp.inner, counts, **options)
        return token_product.add_product(h, mlp.down, number, stream.x, after)
    options |= dict(batch=batch)
    stream, gate = token_pairs.add_product_gate(attended, *out, mlp, counts, rectifier, **options)
    return token_ffn.add(gate, stream, mlp, number, counts, after, rectifier, batch=batch, eps=eps)

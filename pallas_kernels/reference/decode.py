"""The meaning of the kernels for few tokens, and of the layers of a decoding step."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import (
    Cache,
    Operand,
    Quantised,
    for_product,
    rounded,
    times,
    tokens,
    values_of,
)
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights, only_live


def few_tokens_ffn(x, weights, rectifier=RELU):
    """The dense block, but ignores weights of neurons that are not active, even inf and NaN."""
    given = tokens(x, weights.inner)

    def product(w):
        return times(for_product(given, w), w)

    g = rectifier.gate(product(weights.activated), x.dtype).astype(x.dtype)
    g = only_live(g, weights.live)
    u = 1.0 if weights.linear is None else rectifier.linear(product(weights.linear))
    h = jnp.where(g != 0, g.astype(jnp.float32) * u, 0)
    fired = jnp.any(g != 0, axis=0)
    used = jnp.where(fired[:, None], weights.down, 0).astype(jnp.float32)
    y = jnp.dot(h, used, precision="highest")
    nnz = jnp.sum(g != 0, axis=1, dtype=jnp.int32)
    l1 = jnp.sum(jnp.abs(h), axis=1)
    if weights.linear is not None:  # 0 * inf: an up projection meets a gate of zero
        most = g.shape[1] if weights.live is None else weights.live
        is_nan = ~jnp.all(jnp.isfinite(x), axis=1) & (nnz < most)
        y, l1 = jnp.where(is_nan[:, None], jnp.nan, y), jnp.where(is_nan, jnp.nan, l1)
    return y.astype(x.dtype), nnz, l1, fired


def project(stream, weights, layer, *, k_axis, eps, bias=None, dtype=None):
    """Rounds once, at the end."""
    y = jnp.concatenate([product(stream.scaled, w, layer, k_axis) for w in weights], axis=1)
    y = _plus(y * stream.inverse_rms(eps), bias, layer)
    return y.astype(dtype or stream.x.dtype)


def _plus(y: jax.Array, bias: jax.Array | None, layer: jax.Array) -> jax.Array:
    """With the bias of a layer, if there is one."""
    return y if bias is None else y + bias[layer[0]].astype(jnp.float32)


def hidden(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    eps: float,
    rectifier: Rectifier | None,
    live: jax.Array | None = None,
    biases: tuple[jax.Array, ...] | None = None,
) -> jax.Array:
    """Rounds once, at the end."""
    inverse_rms = stream.inverse_rms(eps)
    g, *up = (
        _plus(product(stream.scaled, w, layer, 2) * inverse_rms, bias, layer)
        for w, bias in zip(weights, biases or len(weights) * (None,), strict=True)
    )
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
    residual_scale: float = 1.0,
) -> Stream:
    """Rounds the sum of stream and product, which is scaled, once."""
    y = _plus(product(h, weight, layer, 1), bias, layer)
    y = x.astype(jnp.float32) + residual_scale * y
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


def decode_attention(
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    k_cache: Cache,
    v_cache: Cache,
    layer: jax.Array,
    lengths: jax.Array,
    *,
    heads: int,
    kv_heads: int,
    window: int | None = None,
) -> jax.Array:
    """Attends to all slots of the layer with a mask; rows of the result from B on are zeros."""
    _, batch, capacity, _, size = k_cache.shape
    dtype = qkv.dtype
    vectors = qkv[:batch].reshape(batch, heads + 2 * kv_heads, size)
    q, k, v = jnp.split(vectors, [heads, heads + kv_heads], axis=1)
    _keep(k_cache, layer[0], lengths, _rotate(k, rope))
    _keep(v_cache, layer[0], lengths, v)

    slots = jnp.arange(capacity)
    attends = slots <= lengths[:, None]
    if window is not None:
        attends &= slots > lengths[:, None] - window
    keys, values = (
        jnp.where(attends[:, :, None, None], _kept(cache, layer[0]), 0)
        for cache in (k_cache, v_cache)
    )
    q = _rotate(q, rope).reshape(batch, kv_heads, heads // kv_heads, size).astype(jnp.float32)
    scores = jnp.einsum("bhgd,bshd->bhgs", q, keys, precision="highest") / size**0.5
    p = jax.nn.softmax(jnp.where(attends[:, None, None], scores, -jnp.inf)).astype(dtype)
    attended = jnp.einsum("bhgs,bshd->bhgd", p.astype(jnp.float32), values, precision="highest")
    attended = attended.reshape(batch, heads * size).astype(dtype)
    return jnp.pad(attended, ((0, qkv.shape[0] - batch), (0, 0)))


def _keep(cache: Cache, layer: jax.Array, lengths: jax.Array, new: jax.Array) -> None:
    """Stores keys or values `[B, kv_heads, head_dim]`, rounded if the cache is `Quantised`."""
    sequence = jnp.arange(len(new))
    if isinstance(cache, Quantised):
        of, head = rounded(new), jnp.arange(new.shape[1])
        cache.scale[layer, sequence[:, None], head, lengths[:, None]] = of.scale[..., 0]
        new = of.values
    values_of(cache)[layer, sequence, lengths] = new


def _kept(cache: Cache, layer: jax.Array) -> jax.Array:
    """Those of a layer, float32 `[B, S, kv_heads, head_dim]`."""
    found = values_of(cache)[layer].astype(jnp.float32)
    if isinstance(cache, Quantised):
        found *= jnp.swapaxes(cache.scale[layer], 1, 2)[..., None]
    return found


def _norm_heads(qkv, scales, heads, kv_heads, eps):
    """The RMS norm of each query and each key in `qkv`."""
    size = len(scales[0])
    vectors = qkv.reshape(len(qkv), -1, size)
    q, k, v = jnp.split(vectors, [heads, heads + kv_heads], axis=1)
    normed = []
    for x, scale in zip((q, k), scales, strict=True):
        wide = x.astype(jnp.float32)
        wide *= jax.lax.rsqrt(jnp.mean(wide * wide, axis=-1, keepdims=True) + eps)
        normed.append((wide * scale.astype(jnp.float32)).astype(qkv.dtype))
    return jnp.concatenate([*normed, v], axis=1).reshape(qkv.shape)


def _rotate(x, rope):
    """Rotates features i and i + n of `x: [B, heads, head_dim]` by n angles; others stay."""
    cos, sin = (table[:, None] for table in rope)
    half = cos.shape[-1]
    a, b, rest = jnp.split(x.astype(jnp.float32), [half, 2 * half], axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin, rest], axis=-1).astype(x.dtype)


def gate(
    stream: Stream,
    mlp: Weights,
    layer: jax.Array,
    rectifier: Rectifier,
    *,
    eps: float,
    bias: jax.Array | None = None,
) -> jax.Array:
    """The gate of a sparse block, `[M, H]`; where its product is -inf it is -0.0, not ignored."""
    before = product(stream.scaled, mlp.activated, layer, 2) * stream.inverse_rms(eps)
    before = _plus(before, bias, layer)
    g = jnp.where(before == -jnp.inf, -0.0, rectifier.gate(before, stream.x.dtype))
    return of_live(g.astype(stream.x.dtype), mlp.live, layer)


def add_ffn(
    gate: jax.Array,
    stream: Stream,
    mlp: Weights,
    layer: jax.Array,
    scale: jax.Array,
    rectifier: Rectifier = RELU,
    *,
    eps: float,
    residual_scale: float = 1.0,
    biases: tuple[jax.Array | None, jax.Array | None] = (None, None),
) -> Stream:
    """Computes up for all neurons, and ignores it where the gate is 0, but not where it is -0.

    `biases` are those of up, with a gate, and of down.
    """
    h = gate
    if mlp.linear is not None:
        of = dict(k_axis=2, eps=eps, dtype=jnp.float32)
        up = project(stream, (mlp.linear,), layer, bias=biases[0], **of)
        h = gate.astype(jnp.float32) * rectifier.linear(up)
        h = jnp.where((gate != 0) | jnp.signbit(gate), h, 0.0)
    h = h.astype(gate.dtype)
    return add_product(
        h, mlp.down, layer, stream.x, scale, bias=biases[1], residual_scale=residual_scale
    )


def has_room(
    *, batch, capacity, width, neurons, heads, kv_heads, size, gated, is_sparse, in_8_bits
):
    """It needs none."""
    del batch, capacity, width, neurons, heads, kv_heads, size, gated, is_sparse, in_8_bits
    return True


def decode_layers(
    stream, layers, k_cache, v_cache, lengths, rope,
    *, heads, kv_heads, eps, rectifier, is_sparse, launches=1, window=None,
    residual_scale=1.0,
):  # fmt: skip
    """One layer after the other."""
    del launches
    options = dict(
        heads=heads, kv_heads=kv_heads, eps=eps, rectifier=rectifier, is_sparse=is_sparse,
        window=window, residual_scale=residual_scale,
    )  # fmt: skip
    for number in np.arange(len(layers.mlp.down), dtype=np.int32)[:, None]:
        stream = _layer(stream, layers, number, k_cache, v_cache, lengths, rope, **options)
    return stream


# Traced once for all layers.
@partial(
    jax.jit,
    static_argnames=(
        "heads", "kv_heads", "eps", "rectifier", "is_sparse", "window", "residual_scale",
    ),
)  # fmt: skip
def _layer(
    stream, layers, number, k, v, lengths, rope,
    *, heads, kv_heads, eps, rectifier, is_sparse, window, residual_scale,
):  # fmt: skip
    mlp, (before, after) = layers.mlp, layers.scales
    k_axis = 2 if isinstance(layers.qkv[0], Quantised) else 1
    qkv = project(stream, layers.qkv, number, k_axis=k_axis, eps=eps, bias=layers.qkv_bias)
    if layers.head_scales is not None:
        scales = [scale[number[0]] for scale in layers.head_scales]
        qkv = _norm_heads(qkv, scales, heads, kv_heads, eps)
    attended = decode_attention(
        qkv, rope, k, v, number, lengths, heads=heads, kv_heads=kv_heads, window=window
    )
    scaled = dict(residual_scale=residual_scale)
    stream = add_product(
        attended, layers.out, number, stream.x, before, bias=layers.out_bias, **scaled
    )
    stream = _in_front_of(stream, layers, 0, number, eps)
    inner, down = layers.inner_biases or len(mlp.inner) * (None,), layers.down_bias
    if is_sparse:
        g = gate(stream, mlp, number, rectifier, eps=eps, bias=inner[0])
        biases = inner[-1], down
        stream = add_ffn(g, stream, mlp, number, after, rectifier, eps=eps, biases=biases, **scaled)
    else:
        of = dict(eps=eps, rectifier=rectifier, live=mlp.live, biases=inner)
        h = hidden(stream, mlp.inner, number, **of)
        stream = add_product(h, mlp.down, number, stream.x, after, bias=down, **scaled)
    return _in_front_of(stream, layers, 1, number, eps)


def _in_front_of(stream, layers, which, number, eps):
    """The stream in front of a layer's norm, if that is a layer norm; else it is there already."""
    if layers.norm_biases is None:
        return stream
    of_norm = (of[which][number[0]] for of in (layers.scales, layers.norm_biases))
    return Stream.of(stream.x, *of_norm, eps=eps)

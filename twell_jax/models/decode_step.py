"""One more token of each of a few sequences, by kernels that `decoding` has chosen.

`pallas_kernels.hopper.decode.step` has the layers. Its kernels take the stacked weights of all
layers and a layer's number, so nothing is copied.
"""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from pallas_kernels import in_place
from pallas_kernels.kernels import DecodeKernels
from pallas_kernels.layers import Layers
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Operand, Quantised
from pallas_kernels.weights import Weights
from twell_jax.ffn.activations import rectifier
from twell_jax.models.attention import Attention
from twell_jax.models.cache import KVCache
from twell_jax.models.layers import scaled
from twell_jax.models.quantised import QuantisedLinear
from twell_jax.models.rope import rope_table
from twell_jax.models.transformer import Transformer

_ROWS = 8  # kernels take a multiple of so many tokens
_COLUMNS = 64  # and matrices with a multiple of so many columns


def step(
    kernels: DecodeKernels,
    model: Transformer,
    tokens: jax.Array,
    cache: KVCache,
    *,
    is_sparse: bool,
    launches: int,
    window: int | None,
) -> tuple[jax.Array, KVCache]:
    """What `decoding.decode` returns.

    Args:
      kernels: they can serve the model.
      model, tokens, cache: as of `decode`.
      is_sparse: whether feed-forward blocks compute active neurons alone.
      launches: that compute all layers, or 0.
      window: tokens that a token attends to, itself included; None: all.
    """
    config, batch = model.config, len(tokens)
    layers, first_norm = _layers(model)
    act = rectifier(config.ffn_activation)
    cos, sin = rope_table(cache.lengths[:, None], config)
    rope = cos.reshape(batch, -1), sin.reshape(batch, -1)
    x = scaled(model.embed(jnp.pad(tokens[:, 0], (0, -batch % _ROWS))), config.embed_scale)
    # The first layer reads the cache at once. A cache that is not donated has been copied by then:
    # XLA copies it first, and the kernels that make the stream wait for what comes before them.
    stream = Stream.of(x, *first_norm, eps=config.norm_eps)
    k, v = (jax.tree.map(in_place.mutable, stored) for stored in (cache.k, cache.v))
    stream = kernels.decode_layers(
        stream,
        layers,
        k,
        v,
        cache.lengths,
        rope,
        heads=config.heads,
        kv_heads=config.num_kv_heads,
        eps=config.norm_eps,
        rectifier=act,
        is_sparse=is_sparse,
        launches=launches,
        window=window,
        residual_scale=config.residual_scale,
    )
    logits = _logits(kernels, model, stream)[:batch]
    k, v = (jax.tree.map(in_place.contents, ref) for ref in (k, v))
    return logits, KVCache(k, v, cache.lengths).advance(1)


def _layers(model: Transformer) -> tuple[Layers, list[jax.Array]]:
    """The stacked weights; and of the first norm the scale, and the bias if it is a layer norm."""
    attention, mlp = model.blocks.attention, model.blocks.mlp
    qkv = attention.query, attention.key, attention.value
    biases = [_array(p.bias) for p in (*qkv, attention.out)] if model.config.attention_bias else []
    inner_biases = (mlp.b_gate, mlp.b_up) if model.config.gated else (mlp.b_up,)
    names = ("scale", "bias") if model.config.norm == "layer" else ("scale",)
    scales, *norm_biases = (_of_norms(model, name) for name in names)
    return Layers(
        qkv=tuple(_matrix(projection) for projection in qkv),
        qkv_bias=jnp.concatenate(biases[:3], axis=1) if biases else None,
        out=_matrix(attention.out),
        out_bias=biases[3] if biases else None,
        mlp=Weights(
            _array(mlp.w_gate) if model.config.gated else None,
            _array(mlp.w_up),
            _array(mlp.w_down),
            _array(mlp.live) if model.config.live_width else None,
        ),
        scales=scales[1:],
        head_scales=_head_scales(attention),
        norm_biases=norm_biases[0][1:] if norm_biases else None,
        inner_biases=tuple(map(_array, inner_biases)) if model.config.mlp_bias else None,
        down_bias=_array(mlp.b_down) if model.config.mlp_bias else None,
    ), [first[0] for first, *_ in (scales, *norm_biases)]


def _of_norms(model: Transformer, name: str) -> tuple[jax.Array, jax.Array, jax.Array]:
    """A parameter of the norms, `[L, D]` each: in front of attention, in front of the feed-forward
    block, and behind that, which is the next layer's first or the model's last."""
    before, between, last = (
        _array(getattr(norm, name))
        for norm in (model.blocks.attention_norm, model.blocks.mlp_norm, model.norm)
    )
    return before, between, jnp.concatenate([before[1:], last[None]])


def _head_scales(attention: Attention) -> tuple[jax.Array, jax.Array] | None:
    if attention.query_norm is None or attention.key_norm is None:
        return None
    return _array(attention.query_norm.scale), _array(attention.key_norm.scale)


def _array(parameter: Any) -> Any:
    return parameter[...]


def _matrix(layer: nnx.Linear | QuantisedLinear) -> Operand:
    return _array(layer.weight if isinstance(layer, QuantisedLinear) else layer.kernel)


def _k_axis(matrix: Operand) -> int:
    """The axis of its inputs in a stack of such matrices."""
    return 2 if isinstance(matrix, Quantised) else 1


def _logits(kernels: DecodeKernels, model: Transformer, stream: Stream) -> jax.Array:
    weight, k_axis = _array(model.embed.embedding), 2
    if model.unembed is not None:
        weight = _matrix(model.unembed)
        k_axis = _k_axis(weight)
    is_centred = model.config.norm == "layer"
    if is_centred or model.config.vocab_size % _COLUMNS or model.config.d_model % 1024:
        return model.logits(model.norm(stream.x))
    only: Any = np.zeros(1, np.int32)  # a constant
    project = partial(kernels.project, eps=model.config.norm_eps, dtype=jnp.float32)
    logits = project(stream, (jax.tree.map(lambda a: a[None], weight),), only, k_axis=k_axis)
    return scaled(logits, model.config.logit_scale)

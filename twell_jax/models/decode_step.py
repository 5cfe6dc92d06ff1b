"""One more token of each of a few sequences, by kernels that read every weight once.

The program is a chain of five kernels for each layer, each launched while the one before it still
runs: query, key and value projections; attention, which also rotates and appends; the output
projection; the gate; and the rest of the feed-forward block. Norms and residuals are part of the
products (`layouts.stream`). The kernels take the stacked weights of all layers and a layer's
number, so nothing is copied. The layers are unrolled, as a loop's own kernels would come between.
"""

from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels import in_place
from pallas_kernels.kernels import Kernels
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.weights import Weights
from twell_jax.config import ModelConfig
from twell_jax.ffn import dispatch
from twell_jax.ffn.partition import auto_axes
from twell_jax.models.attention import rope_table
from twell_jax.models.cache import KVCache

if TYPE_CHECKING:
    from twell_jax.models.transformer import Transformer

_ROWS = 8  # kernels take a multiple of so many tokens
_COLUMNS = 64  # and matrices with a multiple of so many columns


class Layers(NamedTuple):
    """What the kernels read, stacked over layers.

    Attributes:
      qkv: the kernels of the query, key and value projections, each `[layers, D, N]`.
      qkv_bias: `[layers, sum of N]`, or None.
      out: `[layers, heads * head_dim, D]`.
      out_bias: `[layers, D]`, or None.
      mlp: of the feed-forward blocks, each `[layers, H, D]`.
      scales: of the norms, `[layers, D]` each: before the feed-forward block of a layer, and after
        it, which is the next layer's first or the last of the model.
    """

    qkv: tuple[jax.Array, ...]
    qkv_bias: jax.Array | None
    out: jax.Array
    out_bias: jax.Array | None
    mlp: Weights
    scales: tuple[jax.Array, jax.Array]


def kernels_for(model: "Transformer", batch: int) -> tuple[Kernels | None, str | None]:
    """The kernels that can extend `batch` sequences by a token here and None, or None and why none
    can."""
    config, weights = model.config, model.blocks.mlp.w_down
    if config.decode_implementation == "xla":
        return None, "decode_implementation='xla' was asked for"
    kernels, why = dispatch.back_end(weights[0])
    if kernels is None:
        return None, why
    why = _unsupported(config, batch)
    return (None, why) if why else (kernels, None)


def _unsupported(config: ModelConfig, batch: int) -> str | None:
    if auto_axes():
        return "it serves one device, not a mesh"
    if config.dtype != config.param_dtype or jnp.dtype(config.dtype).itemsize != 2:
        return f"weights and computation must be bfloat16, got {config.param_dtype}, {config.dtype}"
    if batch > dispatch.MAX_FEW_TOKENS:
        return f"at most {dispatch.MAX_FEW_TOKENS} sequences, got {batch}"
    width = config.heads * config.head_dim
    if config.head_dim not in (64, 128) or config.heads > 8 * config.num_kv_heads:
        return "heads must have 64 or 128 features, and at most 8 share a key/value head"
    if config.d_model % 1024 or width % 256 or config.d_ff % 256:
        return "d_model must be a multiple of 1024, d_ff and the heads together one of 256"
    return None


def step(
    kernels: Kernels, model: "Transformer", tokens: jax.Array, cache: KVCache
) -> tuple[jax.Array, KVCache]:
    """`Transformer.decode` of one token of each sequence.

    Args:
      kernels: see `kernels_for`.
      model: the model.
      tokens: int `[B]`.
      cache: what came before; its arrays are changed in place where the caller donates them.

    Returns:
      The logits, float32 `[B, vocab]`, and the extended cache.
    """
    config, batch = model.config, len(tokens)
    layers, first_scale = _layers(model)
    selection = dispatch.select(
        dispatch.Case(batch, config.d_ff, config.gated, kernels.name, None, _not_relu(config)),
        dispatch.Request(config.ffn_implementation),
    )
    rope = rope_table(cache.length - cache.padding[:, None], config)
    rope = tuple(table.reshape(batch, -1) for table in rope)
    x = model.embed(jnp.pad(tokens, (0, -batch % _ROWS)))
    stream = Stream.of(x, first_scale)
    k, v = in_place.mutable(cache.k), in_place.mutable(cache.v)
    layer = partial(
        _layer, kernels=kernels, config=config, sparse=selection.rule.algorithm == "few_tokens"
    )
    for number in range(config.layers):
        stream = layer(
            stream, layers, np.array([number], np.int32), k, v, cache.length[None], cache.padding, rope
        )
    logits = _logits(kernels, model, stream)[:batch]
    extended = KVCache(in_place.contents(k), in_place.contents(v), cache.length, cache.padding)
    return logits, extended.advance(1)


def _not_relu(config: ModelConfig) -> str | None:
    return None if config.activation == "relu" else f"the activation is {config.activation}"


def _layers(model: "Transformer") -> tuple[Layers, jax.Array]:
    """The stacked weights, and the scale of the first norm."""
    blocks = model.blocks
    attention, mlp = blocks.attention, blocks.mlp
    qkv = attention.query, attention.key, attention.value
    first = blocks.attention_norm.scale[...]
    following = jnp.concatenate([first[1:], model.norm.scale[...][None]])
    bias = model.config.attention_bias
    gate = mlp.w_gate[...] if model.config.gated else None
    return Layers(
        qkv=tuple(projection.kernel[...] for projection in qkv),
        qkv_bias=jnp.concatenate([p.bias[...] for p in qkv], axis=1) if bias else None,
        out=attention.out.kernel[...],
        out_bias=attention.out.bias[...] if bias else None,
        mlp=Weights(gate, mlp.w_up[...], mlp.w_down[...]),
        scales=(blocks.mlp_norm.scale[...], following),
    ), first[0]


@partial(jax.jit, static_argnames=("kernels", "config", "sparse"))  # traced once for all layers
def _layer(stream, layers, number, k, v, length, padding, rope, *, kernels, config, sparse):
    eps, batch = config.norm_eps, len(padding)
    qkv = kernels.project(stream, layers.qkv, number, k_axis=1, eps=eps, bias=layers.qkv_bias)
    heads = dict(heads=config.heads, kv_heads=config.num_kv_heads)
    attended = kernels.decode_attention(qkv, rope, k, v, number, length, padding, **heads)
    before, after = layers.scales
    stream = kernels.add_product(
        attended, layers.out, number, stream.x, before, bias=layers.out_bias
    )
    mlp = layers.mlp
    if not sparse:
        h = kernels.gate(stream, mlp.inner, number, eps=eps, activation=config.activation)
        return kernels.add_product(h, mlp.down, number, stream.x, after)
    rows = tuple(w for w in (mlp.linear, mlp.down) if w is not None)
    g = kernels.gate(
        stream, (mlp.activated,), number, eps=eps, activation="relu", prefetch=rows, batch=batch
    )
    return kernels.add_rows(g, stream, mlp, number, after, tokens=batch, eps=eps)


def _logits(kernels: Kernels, model: "Transformer", stream: Stream) -> jax.Array:
    weight = model.embed.embedding[...] if model.unembed is None else model.unembed.kernel[...]
    k_axis = 2 if model.unembed is None else 1
    if weight[None].shape[3 - k_axis] % _COLUMNS:
        return model.logits(model.norm(stream.x))
    only = np.zeros(1, np.int32)
    project = partial(kernels.project, eps=model.config.norm_eps, dtype=jnp.float32)
    return project(stream, (weight[None],), only, k_axis=k_axis)


"""A Llama-style decoder whose feed-forward blocks are sparse: RMSNorm, RoPE, causal attention."""

from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from operator import itemgetter

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.ffn import RESIDUALS
from twell_jax.ffn.api import FFNStats, Implementation
from twell_jax.ffn.module import SparseMLP
from twell_jax.models.sharding import LOGICAL_AXES, auto_axes, on_shares, split_batch

_REMAT = {
    "dots": jax.checkpoint_policies.save_from_both_policies(
        jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
        jax.checkpoint_policies.save_only_these_names(RESIDUALS),
    ),
    "block": jax.checkpoint_policies.nothing_saveable,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far, for all layers.

    Attributes:
      k, v: `[layers, B, S, kv_heads, head_dim]` in the compute dtype; S is the capacity.
      length: int32 [], tokens stored, padding included.
      padding: int32 [B], how many of a sequence's first tokens are padding. Nothing attends to
        them, and positions count from the first token after them.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array
    padding: jax.Array

    @classmethod
    def empty(
        cls, config: ModelConfig, batch: int, capacity: int, padding: jax.Array | None = None
    ) -> "KVCache":
        """Room for `capacity` tokens; `padding` is 0 for every sequence unless given."""
        shape = (config.layers, batch, capacity, config.num_kv_heads, config.head_dim)
        k, v = jnp.zeros(shape, config.dtype), jnp.zeros(shape, config.dtype)
        padding = jnp.zeros(batch, jnp.int32) if padding is None else padding
        return cls(k, v, jnp.zeros((), jnp.int32), padding)

    def grow(self, capacity: int) -> "KVCache":
        """The same tokens with room for more: `capacity` in all."""
        more = [(0, 0)] * 5
        more[2] = (0, capacity - self.k.shape[2])
        return replace(self, k=jnp.pad(self.k, more), v=jnp.pad(self.v, more))


class Transformer(nnx.Module):
    """Decoder-only language model.

    `logits, stats = model(tokens)` for training; `logits, cache = model.decode(tokens, cache)` for
    generation. Blocks have their parameters stacked along a leading "layers" axis and run under
    `jax.lax.scan`, so that compile time does not grow with depth.

    Args:
      config: shapes, dtypes and options.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        init = nnx.initializers.normal(config.init_scale)
        self.embed = nnx.Embed(
            config.vocab_size,
            config.d_model,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            embedding_init=init,
            embedding_metadata=_axes("vocab", "embed"),
            rngs=rngs,
        )
        layers = nnx.vmap(
            lambda rngs: Block(config, rngs=rngs),
            transform_metadata={nnx.PARTITION_NAME: "layers"},
        )
        self.blocks = layers(rngs.split(config.layers))
        self.norm = _norm(config, rngs)
        self.unembed = nnx.data(None)
        if not config.tie_embeddings:
            shape = (config.d_model, config.vocab_size)
            self.unembed = _linear(config, shape, ("embed", "vocab"), rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        document_end: int | None = None,
        per_token_stats: bool = False,
        ffn_implementations: tuple[Implementation | None, ...] | None = None,
    ) -> tuple[jax.Array, FFNStats]:
        """Next-token logits.

        Args:
          tokens: int `[B, T]`.
          document_end: id of the end-of-text token. If given, attention does not cross it and
            positions restart after it (it belongs to the document that it ends).
          per_token_stats: measure each token by itself, not all of them together; `fired` is then
            the pattern of the activations. Kernels run token by token: name "xla" with it.
          ffn_implementations: for each layer, in place of the config's. Layers in a row with the
            same one run in one loop.

        Returns:
          logits: float32 `[B, T, vocab]`, and the `FFNStats` with leading axes `[layers]`, or
          `[layers, B, T]` if per token.
        """
        positions, mask = jnp.arange(tokens.shape[1])[None], None
        if document_end is not None:
            positions, mask = _split_documents(tokens, document_end)
        x, stats, _ = self._run(tokens, positions, mask, None, per_token_stats, ffn_implementations)
        return self._logits(x), stats

    def decode(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Extends sequences by `tokens: int [B, T]`, which follow those in `cache`.

        Returns the float32 `[B, vocab]` logits after the last of them and the extended cache. The
        caller keeps `cache.length + T` within the capacity.
        """
        slots, stored = cache.length + jnp.arange(tokens.shape[1]), jnp.arange(cache.k.shape[2])
        positions = slots - cache.padding[:, None]
        mask = (stored <= slots[:, None]) & (stored >= cache.padding[:, None, None])
        x, _, cache = self._run(tokens, positions, mask[:, None], cache)
        return self._logits(x[:, -1]), cache

    def _run(self, tokens, positions, mask, cache, per_token_stats=False, implementations=None):
        rope = _rope_table(positions, self.config)
        graph, params = nnx.split(self.blocks)
        length = None if cache is None else cache.length

        def block(implementation, carry, layer):
            x, keys_values = carry
            index, params = layer
            block = nnx.merge(graph, params)
            block.mlp.implementation = implementation
            x, stats, keys_values = block(
                x, rope, mask, keys_values, (index, length), per_token_stats
            )
            return (split_batch(x), keys_values), stats

        every = jnp.arange(self.config.layers), params
        carry = split_batch(self.embed(tokens)), None if cache is None else (cache.k, cache.v)
        parts = []
        implementations = implementations or (self.config.ffn_implementation,) * self.config.layers
        for implementation, layers in _runs(implementations):
            body = partial(block, implementation)
            if self.config.remat != "none":
                body = jax.checkpoint(body, policy=_REMAT[self.config.remat], prevent_cse=False)
            carry, part = jax.lax.scan(body, carry, jax.tree.map(itemgetter(layers), every))
            parts.append(part)
        x, keys_values = carry
        stats = jax.tree.map(lambda *a: jnp.concatenate(a), *parts)
        if cache is not None:
            k, v = keys_values
            cache = replace(cache, k=k, v=v, length=length + tokens.shape[1])
        return self.norm(x), stats, cache

    def _logits(self, x):
        logits = self.embed.attend(x) if self.unembed is None else self.unembed(x)
        return logits.astype(jnp.float32)


def _runs(values):
    """Each value that is not that before it, and the slice of those that equal it."""
    start = 0
    for value, equal in groupby(values):
        stop = start + len(list(equal))
        yield value, slice(start, stop)
        start = stop


def graphdef(config: ModelConfig) -> nnx.GraphDef:
    """The structure of a `Transformer`; `nnx.merge` makes a model of it and parameters."""
    with nnx.logical_axis_rules(LOGICAL_AXES):
        return nnx.graphdef(nnx.eval_shape(lambda: Transformer(config, rngs=nnx.Rngs(0))))


class Block(nnx.Module):
    """Attention and feed-forward, each after an RMS norm and added to the residual stream."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.attention_norm = _norm(config, rngs)
        self.attention = Attention(config, rngs=rngs)
        self.mlp_norm = _norm(config, rngs)
        self.mlp = SparseMLP(
            config.d_model,
            config.d_ff,
            gated=config.gated,
            activation=config.activation,
            dtype=config.dtype,
            param_dtype=config.param_dtype,
            up_init=nnx.initializers.normal(config.init_scale),
            down_init=_residual_init(config),
            implementation=config.ffn_implementation,
            gradient_capacity=config.ffn_gradient_capacity,
            rngs=rngs,
        )

    def __call__(self, x, rope, mask, keys_values, place, per_token_stats):
        attended, keys_values = self.attention(
            self.attention_norm(x), rope, mask, keys_values, place
        )
        x = x + attended
        mlp = jax.vmap(jax.vmap(self.mlp)) if per_token_stats else self.mlp
        y, stats = mlp(self.mlp_norm(x))
        return x + y, stats, keys_values


class Attention(nnx.Module):
    """Causal attention with rotary positions and grouped key/value heads (GQA)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, kv_width = (n * config.head_dim for n in (config.heads, config.num_kv_heads))
        linear = partial(_linear, config, use_bias=config.attention_bias, rngs=rngs)
        self.query = linear((config.d_model, width), ("embed", "heads"))
        self.key = linear((config.d_model, kv_width), ("embed", "heads"))
        self.value = linear((config.d_model, kv_width), ("embed", "heads"))
        self.out = linear(
            (width, config.d_model), ("heads", "embed"), kernel_init=_residual_init(config)
        )

    def __call__(self, x, rope, mask, keys_values, place):
        """`x: [B, T, D]`; returns the same shape and the extended keys and values, if any.

        mask: bool `[B, 1, T, S]`, or None for causal attention within `x`.
        keys_values: those of all layers, or None.
        place: in them, the layer and how many tokens are stored.
        """

        def heads(projection):
            return projection(x).reshape(*x.shape[:2], -1, self.config.head_dim)

        q, k = _rotate(heads(self.query), rope), _rotate(heads(self.key), rope)
        v = heads(self.value)
        if keys_values is not None:
            layer, length = place
            start = layer, 0, length, 0, 0
            keys_values = tuple(
                jax.lax.dynamic_update_slice(stored, new[None], start)
                for stored, new in zip(keys_values, (k, v), strict=True)
            )
            k, v = (jax.lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in keys_values)
        attended = on_shares(_attend, q, k, v, mask)
        return self.out(attended.reshape(*x.shape[:2], -1)), keys_values


def _attend(q, k, v, mask):
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        is_causal=mask is None,
        implementation="cudnn" if _cudnn_can_serve(q, k, mask) else "xla",
    )


def _cudnn_can_serve(q, k, mask) -> bool:
    length, head_dim = q.shape[1], q.shape[3]
    return (
        jax.default_backend() == "gpu"
        and not auto_axes()
        and q.dtype.itemsize == 2
        and head_dim % 8 == 0
        and head_dim <= 128
        and (mask is None or (length == k.shape[1] and length % 2 == 0))
    )


def _rope_table(positions, config):
    """cos and sin of the rotary angles, float32 `[B or 1, T, 1, head_dim / 2]` (RoFormer 3.2.2)."""
    exponent = jnp.arange(0, config.head_dim, 2, dtype=jnp.float32) / config.head_dim
    angle = positions[..., None, None] * config.rope_theta**-exponent
    return jnp.cos(angle), jnp.sin(angle)


def _rotate(x, rope):
    cos, sin = rope
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)


def _split_documents(tokens, document_end):
    """Positions `[B, T]` within each document and the mask `[B, 1, T, T]` that keeps them apart."""
    starts = jnp.pad(tokens[:, :-1] == document_end, ((0, 0), (1, 0)), constant_values=True)
    index = jnp.arange(tokens.shape[1])
    first = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    same = first[:, :, None] == first[:, None, :]
    return index - first, (same & (index[:, None] >= index))[:, None]


def _axes(*names):
    # Not sharded eagerly: a model can also be made where there is no mesh.
    return {"out_sharding": names, "eager_sharding": False}


def _norm(config, rngs):
    return nnx.RMSNorm(
        config.d_model,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        scale_metadata=_axes("embed"),
        rngs=rngs,
    )


def _linear(config, shape, axes, *, use_bias=False, kernel_init=None, rngs):
    return nnx.Linear(
        *shape,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=kernel_init or nnx.initializers.normal(config.init_scale),
        kernel_metadata=_axes(*axes),
        bias_metadata=_axes(axes[1]),
        rngs=rngs,
    )


def _residual_init(config):
    # Each block adds twice to the residual stream; this keeps its variance independent of depth.
    return nnx.initializers.normal(config.init_scale / (2 * config.layers) ** 0.5)

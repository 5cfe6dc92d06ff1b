"""A Llama-style decoder whose feed-forward blocks are sparse: RMSNorm, RoPE, causal attention."""

from dataclasses import dataclass

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.config import ModelConfig
from twell_jax.ffn import FFNStats
from twell_jax.mlp import SparseMLP
from twell_jax.sharding import LOGICAL_AXES, split_batch

_REMAT = {
    "dots": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "block": jax.checkpoint_policies.nothing_saveable,
}


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far, for all layers.

    Attributes:
      k, v: `[layers, B, S, kv_heads, head_dim]` in the compute dtype; S is the capacity.
      length: int32 [], tokens stored.
    """

    k: jax.Array
    v: jax.Array
    length: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int) -> "KVCache":
        shape = (config.layers, batch, capacity, config.num_kv_heads, config.head_dim)
        zeros = jnp.zeros(shape, config.dtype)
        return cls(zeros, zeros, jnp.zeros((), jnp.int32))


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
            self.unembed = _linear(config, "embed", "vocab", config.vocab_size, rngs=rngs)

    def __call__(
        self,
        tokens: jax.Array,
        *,
        document_end: int | None = None,
        per_token_stats: bool = False,
    ) -> tuple[jax.Array, FFNStats]:
        """Next-token logits.

        Args:
          tokens: int `[B, T]`.
          document_end: id of the end-of-text token. If given, attention does not cross it and
            positions restart after it (it belongs to the document that it ends).
          per_token_stats: measure each token by itself, not all of them together; `fired` is then
            the pattern of the activations. Kernels run token by token: name "xla" with it.

        Returns:
          logits: float32 `[B, T, vocab]`, and the `FFNStats` with leading axes `[layers]`, or
          `[layers, B, T]` if per token.
        """
        positions, mask = jnp.arange(tokens.shape[1])[None], None
        if document_end is not None:
            positions, mask = _split_documents(tokens, document_end)
        x, stats, _ = self._run(tokens, positions, mask, None, per_token_stats)
        return self._logits(x), stats

    def decode(self, tokens: jax.Array, cache: KVCache) -> tuple[jax.Array, KVCache]:
        """Extends sequences by `tokens: int [B, T]`, which follow those in `cache`.

        Returns the float32 `[B, vocab]` logits after the last of them and the extended cache. The
        caller keeps `cache.length + T` within the capacity.
        """
        positions = cache.length + jnp.arange(tokens.shape[1])[None]
        mask = jnp.arange(cache.k.shape[2]) <= positions[:, None, :, None]
        x, _, cache = self._run(tokens, positions, mask, cache)
        return self._logits(x[:, -1]), cache

    def _run(self, tokens, positions, mask, cache, per_token_stats=False):
        rope = _rope_table(positions, self.config)
        graph, params = nnx.split(self.blocks)
        length = None if cache is None else cache.length

        def block(x, layer):
            params, keys_values = layer
            x, stats, keys_values = nnx.merge(graph, params)(
                x, rope, mask, keys_values, length, per_token_stats
            )
            return split_batch(x), (stats, keys_values)

        if self.config.remat != "none":
            block = jax.checkpoint(block, policy=_REMAT[self.config.remat], prevent_cse=False)
        keys_values = None if cache is None else (cache.k, cache.v)
        x = split_batch(self.embed(tokens))
        x, (stats, keys_values) = jax.lax.scan(block, x, (params, keys_values))
        if cache is not None:
            cache = KVCache(*keys_values, length + tokens.shape[1])
        return self.norm(x), stats, cache

    def _logits(self, x):
        logits = self.embed.attend(x) if self.unembed is None else self.unembed(x)
        return logits.astype(jnp.float32)


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
            rngs=rngs,
        )

    def __call__(self, x, rope, mask, keys_values, length, per_token_stats):
        attended, keys_values = self.attention(
            self.attention_norm(x), rope, mask, keys_values, length
        )
        x = x + attended
        mlp = jax.vmap(jax.vmap(self.mlp)) if per_token_stats else self.mlp
        y, stats = mlp(self.mlp_norm(x))
        return x + y, stats, keys_values


class Attention(nnx.Module):
    """Causal attention with rotary positions and grouped key/value heads (GQA)."""

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, kv_width = config.d_model, config.num_kv_heads * config.head_dim
        self.query = _linear(config, "embed", "heads", width, rngs=rngs)
        self.key = _linear(config, "embed", "heads", kv_width, rngs=rngs)
        self.value = _linear(config, "embed", "heads", kv_width, rngs=rngs)
        self.out = _linear(
            config, "heads", "embed", width, kernel_init=_residual_init(config), rngs=rngs
        )

    def __call__(self, x, rope, mask, keys_values, length):
        """`x: [B, T, D]`; returns the same shape and the layer's extended keys and values, if any.

        mask: bool `[B or 1, 1, T, S]`, or None for causal attention within `x`.
        """

        def heads(projection):
            return projection(x).reshape(*x.shape[:2], -1, self.config.head_dim)

        q, k = _rotate(heads(self.query), rope), _rotate(heads(self.key), rope)
        v = heads(self.value)
        if keys_values is not None:
            extend = jax.lax.dynamic_update_slice_in_dim
            k = extend(keys_values[0], k, length, axis=1)
            v = extend(keys_values[1], v, length, axis=1)
            keys_values = k, v
        attended = jax.nn.dot_product_attention(
            q,
            k,
            v,
            mask=mask,
            is_causal=mask is None,
            implementation="cudnn" if _cudnn_can_serve(q, k, mask) else "xla",
        )
        return self.out(attended.reshape(*x.shape[:2], -1)), keys_values


def _cudnn_can_serve(q, k, mask) -> bool:
    length, head_dim = q.shape[1], q.shape[3]
    return (
        jax.default_backend() == "gpu"
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


def _linear(config, from_axis, to_axis, width, *, kernel_init=None, rngs):
    return nnx.Linear(
        config.d_model,
        width,
        use_bias=False,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=kernel_init or nnx.initializers.normal(config.init_scale),
        kernel_metadata=_axes(from_axis, to_axis),
        rngs=rngs,
    )


def _residual_init(config):
    # Each block adds twice to the residual stream; this keeps its variance independent of depth.
    return nnx.initializers.normal(config.init_scale / (2 * config.layers) ** 0.5)

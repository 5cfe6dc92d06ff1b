"""Causal attention with rotary positions and grouped key/value heads."""

from collections.abc import Sequence
from functools import partial, reduce
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jax.ad_checkpoint import checkpoint_name

from pallas_kernels.kernels import TransformerKernels
from twell_jax.config import ModelConfig
from twell_jax.ffn.float8 import largest
from twell_jax.ffn.partition import auto_axes
from twell_jax.models.cache import KVCache
from twell_jax.models.layers import head_norm, linear, residual_init
from twell_jax.models.quantised import ATTENTION, Part, QuantisedLinear, project, transposed
from twell_jax.models.remat import ROTATED
from twell_jax.models.rope import Rotation, rotate
from twell_jax.models.sharding import on_shares

# Bytes of a layer's keys from which on XLA would copy them for longer than `_attend_one_query`
# takes more kernels: on an H100, steps of Qwen3-0.6B lost with 2 MiB and gained with 16.
_LARGE = 4 << 20


class Bounds(NamedTuple):
    """What no magnitude exceeds, for the scales of products with operands of 8 bits; float32 [].

    Attributes:
      x: elements of tokens after their norm.
      inner: weights of queries, keys and values.
      attended: elements of averages of values.
      out: weights of the output projection.
    """

    x: jax.Array
    inner: jax.Array
    attended: jax.Array
    out: jax.Array


class Attention(nnx.Module):
    """Multi-head attention, causal; several query heads may share a key/value head (GQA).

    Args:
      config: shapes, dtypes and options.
      rngs: source of the initial weights.
    """

    def __init__(self, config: ModelConfig, *, rngs: nnx.Rngs):
        self.config = config
        width, kv_width = (n * config.head_dim for n in (config.heads, config.num_kv_heads))
        project = partial(linear, config, use_bias=config.attention_bias, rngs=rngs)
        self.query = project((config.d_model, width), ("embed", "heads"))
        self.key = project((config.d_model, kv_width), ("embed", "heads"))
        self.value = project((config.d_model, kv_width), ("embed", "heads"))
        self.out = project(
            (width, config.d_model), ("heads", "embed"), kernel_init=residual_init(config)
        )
        self.query_norm, self.key_norm = nnx.data(None), nnx.data(None)
        if config.qk_norm:
            self.query_norm = head_norm(config, rngs)
            self.key_norm = head_norm(config, rngs)

    def __call__(
        self,
        x: jax.Array,
        rope: tuple[jax.Array, jax.Array],
        mask: jax.Array | None,
        cache: KVCache | None = None,
        layer: jax.Array | None = None,
        *,
        bounds: Bounds | None = None,
        kernels: TransformerKernels | None = None,
    ) -> tuple[jax.Array, KVCache | None]:
        """Attends from every token of `x` to those that `mask` allows.

        Args:
          x: `[B, T, D]`.
          rope: `rope_table` of the tokens' positions.
          mask: bool `[B, 1, T, T]` for attention within `x`, without later tokens; None if that is
            all; or bool `[B, 1, T, S]` for attention to a cache with room for S > T tokens.
          cache: keys and values of earlier tokens, to which those of `x` are added; or None.
          layer: int32 [], the index of this layer in the cache; needed with a cache.
          bounds: for projections with operands of 8 bits (`project`); None: they have not.
          kernels: of `project`.

        Returns:
          `[B, T, D]`, and the cache with this layer's new keys and values.
        """

        def heads(projected):
            return projected.reshape(*x.shape[:2], -1, self.config.head_dim)

        def normed(projected, norm):
            if norm is not None:  # whose backward pass needs the projection
                return rotate(norm(heads(projected)), rope)
            # Kept in place of the projection, it is not rotated again for the backward pass.
            return checkpoint_name(heads(projected), ROTATED)

        rotation = Rotation(rope, self.config.head_dim, 2 if self.query_norm is None else 0)
        of_inner, of_out = (bounds[:2], bounds[2:]) if bounds else (None, None)
        inner = self.query, self.key, self.value
        query, key, value = project(x, *inner, most=of_inner, rotation=rotation, kernels=kernels)
        q, k, v = normed(query, self.query_norm), normed(key, self.key_norm), heads(value)
        if cache is not None:
            assert layer is not None
            if mask is not None and mask.shape[3] > x.shape[1]:
                cache = cache.write(layer, k, v)
                k, v = cache.read(layer, x.shape[1], k.dtype)
            else:
                cache = cache.fill(layer, k, v)
        attended = on_shares(_attend, q, k, v, mask)
        attended = attended.reshape(*x.shape[:2], -1)
        (y,) = project(attended, self.out, most=of_out, kernels=kernels, is_written=True)
        return y, cache

    def bounds(self, longest: jax.Array) -> Bounds | None:
        """The bounds for tokens of at most this length; None if a projection is quantised."""
        if self.quantised():
            return None
        inner = (self.query, self.key, self.value)
        of_inner = reduce(jnp.maximum, (_largest_weight(layer) for layer in inner))
        attended = _most_of_averages(self.value, longest)
        found = Bounds(longest, of_inner, attended, _largest_weight(self.out))
        return jax.lax.stop_gradient(found)

    def quantise(self, parts: Sequence[Part]) -> None:
        """Makes 8-bit floats of the weights of those projections that are among `parts`."""
        for name in ATTENTION:
            layer = getattr(self, name)
            if name in parts and isinstance(layer, nnx.Linear):
                setattr(self, name, QuantisedLinear(transposed(layer.kernel), layer.bias))

    def quantised(self) -> list[Part]:
        """The projections whose weights are 8-bit floats."""
        return [name for name in ATTENTION if isinstance(getattr(self, name), QuantisedLinear)]


def _largest_weight(layer: nnx.Linear) -> jax.Array:
    return largest(layer.kernel[...]).astype(jnp.float32)


def _most_of_averages(layer: nnx.Linear, longest: jax.Array) -> jax.Array:
    """What no element of an average of the layer's results exceeds, for inputs of that length."""
    columns = jnp.linalg.norm(layer.kernel[...].astype(jnp.float32), axis=0)
    most = longest * columns.max()
    if layer.bias is not None:
        most += jnp.abs(layer.bias[...].astype(jnp.float32)).max()
    # A quarter more, as operands of 8 bits and the weights of an average may be rounded up.
    return 1.25 * most


def _attend(q, k, v, mask):
    if q.shape[1] == 1 and k.size * k.dtype.itemsize > _LARGE and mask is not None:
        return _attend_one_query(q, k, v, mask)
    by_cudnn = _cudnn_can_serve(q, k, mask)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        mask=mask,
        # A mask within x hides later tokens, too: told that, cuDNN does not compute them.
        is_causal=mask is None or by_cudnn,
        implementation="cudnn" if by_cudnn else "xla",
    )


def _attend_one_query(q, k, v, mask):
    """Attention of one query of each sequence, as sums: for matrix products, XLA copies the whole
    cache into another layout.
    """
    batch, _, heads, size = q.shape
    kv_heads = k.shape[2]
    q = q.astype(jnp.float32).reshape(batch, 1, kv_heads, heads // kv_heads, size)
    scores = jnp.sum(q * k.astype(jnp.float32)[:, :, :, None], axis=-1) * size**-0.5
    scores = jnp.where(mask[:, 0, 0, :, None, None], scores, -jnp.inf)
    p = jax.nn.softmax(scores, axis=1)
    attended = jnp.sum(p[..., None] * v.astype(jnp.float32)[:, :, :, None], axis=1)
    return attended.reshape(batch, 1, heads, size).astype(v.dtype)


def _cudnn_can_serve(q: jax.Array, k: jax.Array, mask: jax.Array | None) -> bool:
    length, head_dim = q.shape[1], q.shape[3]
    return (
        jax.default_backend() == "gpu"
        and not auto_axes()
        and q.dtype.itemsize == 2
        and head_dim % 8 == 0
        and head_dim <= 128
        and (mask is None or (length == k.shape[1] and length % 2 == 0))
    )


def split_documents(tokens: jax.Array, document_end: int) -> tuple[jax.Array, jax.Array]:
    """Treats each document of a packed sequence as if it stood alone.

    Args:
      tokens: int `[B, T]`.
      document_end: id of the token that ends a document and still belongs to it.

    Returns:
      Positions within each document, int32 `[B, T]`, and the mask for causal attention within
      documents, bool `[B, 1, T, T]`.
    """
    starts = jnp.pad(tokens[:, :-1] == document_end, ((0, 0), (1, 0)), constant_values=True)
    index = jnp.arange(tokens.shape[1])
    first = jax.lax.cummax(jnp.where(starts, index, 0), axis=1)
    same = first[:, :, None] == first[:, None, :]
    return index - first, (same & (index[:, None] >= index))[:, None]


def in_window(
    mask: jax.Array | None, first: jax.Array | int, batch: int, count: int, window: int | None
) -> jax.Array | None:
    """Leaves out of a mask the tokens from `window` on before each token.

    Args:
      mask: as `Attention` takes it: bool `[B, 1, T, S]`, or None if it is causal and nothing else.
      first: the place of the first of the T tokens among the S, int or int `[B]`.
      batch, count: B and T.
      window: how many tokens a token attends to, itself included; None if there is no such limit.

    Returns:
      A mask of the same kind.
    """
    stored = count if mask is None else mask.shape[3]
    if window is None or stored <= window:
        return mask
    place = jnp.reshape(first, (-1, 1, 1, 1)) + jnp.arange(count)[:, None]
    distance = place - jnp.arange(stored)
    recent = (distance >= 0) & (distance < window)
    return jnp.broadcast_to(recent, (batch, 1, count, stored)) if mask is None else mask & recent

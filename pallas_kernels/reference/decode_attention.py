"""Meaning of `decode_attention`."""

import jax
import jax.numpy as jnp


def decode_attention(
    qkv: jax.Array,
    rope: tuple[jax.Array, jax.Array],
    k_cache: jax.Ref,
    v_cache: jax.Ref,
    layer: jax.Array,
    length: jax.Array,
    padding: jax.Array,
    *,
    heads: int,
    kv_heads: int,
) -> jax.Array:
    """Attends to all slots of the layer with a mask; rows of the result from B on are zeros."""
    _, batch, capacity, _, size = k_cache.shape
    dtype = qkv.dtype
    vectors = qkv[:batch].reshape(batch, heads + 2 * kv_heads, size)
    q, k, v = jnp.split(vectors, [heads, heads + kv_heads], axis=1)
    k_cache[layer[0], :, length[0]] = _rotate(k, rope)
    v_cache[layer[0], :, length[0]] = v

    slots = jnp.arange(capacity)
    attends = (slots >= padding[:, None]) & (slots <= length[0])
    keys = jnp.where(attends[:, :, None, None], k_cache[layer[0]], 0).astype(jnp.float32)
    values = jnp.where(attends[:, :, None, None], v_cache[layer[0]], 0).astype(jnp.float32)
    q = _rotate(q, rope).reshape(batch, kv_heads, heads // kv_heads, size).astype(jnp.float32)
    scores = jnp.einsum("bhgd,bshd->bhgs", q, keys, precision="highest") / size**0.5
    p = jax.nn.softmax(jnp.where(attends[:, None, None], scores, -jnp.inf)).astype(dtype)
    attended = jnp.einsum("bhgs,bshd->bhgd", p.astype(jnp.float32), values, precision="highest")
    attended = attended.reshape(batch, heads * size).astype(dtype)
    return jnp.pad(attended, ((0, qkv.shape[0] - batch), (0, 0)))


def _rotate(x, rope):
    """Rotates features i and i + head_dim / 2 of `x: [B, heads, head_dim]`."""
    cos, sin = (table[:, None] for table in rope)
    a, b = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    return jnp.concatenate([a * cos - b * sin, b * cos + a * sin], axis=-1).astype(x.dtype)

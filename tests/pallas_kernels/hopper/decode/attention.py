"""Operands of attention for decoding, of NumPy."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

from tests import seeds

LAYERS, LAYER = 3, 1


def draw(heads, kv_heads, size, batch, capacity, longest, dtype, *, ragged=True, fill=np.nan):
    """Operands, of NumPy; `fill` is in all slots of the cache that nothing may attend to."""
    normal = functools.partial(seeds.rng().standard_normal, dtype=np.float32)
    qkv = normal((batch + 3, (heads + 2 * kv_heads) * size)).astype(dtype)
    qkv[batch:] = np.nan
    angle = 10 * normal((batch, size // 2))
    lengths = np.full(batch, longest, np.int32)
    if ragged:
        lengths[:-1] = seeds.rng().integers(0, longest + 1, batch - 1)
        lengths[0] = 0  # nothing but the new token
    stored = np.arange(capacity) < lengths[:, None]
    caches = []
    for _ in range(2):
        cache = np.full((LAYERS, batch, capacity, kv_heads, size), fill, dtype)
        layer = normal(cache.shape[1:])
        cache[LAYER] = np.where(stored[:, :, None, None], layer, fill).astype(dtype)
        caches.append(cache)
    layer = np.full(1, LAYER, np.int32)
    return qkv, (np.cos(angle), np.sin(angle)), *caches, layer, lengths


def shapes(heads, kv_heads, size, batch, capacity, dtype):
    one, shape = jax.ShapeDtypeStruct((1,), jnp.int32), jax.ShapeDtypeStruct
    qkv = shape((-(-batch // 8) * 8, (heads + 2 * kv_heads) * size), dtype)
    table = shape((batch, size // 2), jnp.float32)
    cache = shape((LAYERS, batch, capacity, kv_heads, size), dtype)
    return qkv, (table, table), cache, cache, one, shape((batch,), jnp.int32)

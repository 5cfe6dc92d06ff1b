"""Caches of keys and values that are drawn."""

import jax

from twell_jax.config import ModelConfig
from twell_jax.models import KVCache


def drawn(config: ModelConfig, batch: int, capacity: int, key: jax.Array) -> KVCache:
    """A cache of normally distributed numbers, the same ones whatever its dtype; lengths are 0."""

    def fill(layer: jax.Array, cache: KVCache) -> KVCache:
        keys = jax.random.split(jax.random.fold_in(key, layer))
        found = (jax.random.normal(one, cache.k.shape[1:], config.dtype) for one in keys)
        return cache.fill(layer, *found)

    empty = KVCache.empty(config, batch, capacity)
    return jax.lax.fori_loop(0, config.layers, fill, empty)

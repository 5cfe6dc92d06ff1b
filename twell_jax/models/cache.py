"""The key/value cache for generation."""

from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from twell_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far, for all layers.

    Attributes:
      k, v: `[layers, B, S, kv_heads, head_dim]` in the compute dtype; S is the capacity. Slots that
        hold no token yet may hold anything, NaN too: to fill them takes 3 % of reading a prompt.
      lengths: int32 [B], number of tokens stored of each sequence, in its first slots.
    """

    k: jax.Array
    v: jax.Array
    lengths: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int) -> "KVCache":
        """A cache with room for `capacity` tokens of each of `batch` sequences."""
        shape = (config.layers, batch, capacity, config.num_kv_heads, config.head_dim)
        k, v = jax.lax.empty(shape, config.dtype), jax.lax.empty(shape, config.dtype)
        return cls(k, v, jnp.zeros(batch, jnp.int32))

    def place(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Where the next `count` tokens go.

        Returns:
          Their positions, int32 `[B, count]`, and which of the stored tokens each may attend to,
          bool `[B, 1, count, S]`: itself and earlier ones.
        """
        positions = self.lengths[:, None] + jnp.arange(count)
        mask = jnp.arange(self.k.shape[2]) <= positions[:, :, None]
        return positions, mask[:, None]

    def write(self, layer: jax.Array, k: jax.Array, v: jax.Array) -> "KVCache":
        """Stores keys and values of the next tokens, `[B, T, kv_heads, head_dim]`, in one layer.

        `lengths` stays, as other layers follow; `advance` increases it.
        """
        (batch, count), (positions, _) = k.shape[:2], self.place(k.shape[1])
        sequence = jnp.broadcast_to(jnp.arange(batch)[:, None], (batch, count))
        keys, values = (
            stored.at[layer, sequence, positions].set(new, unique_indices=True)
            for stored, new in ((self.k, k), (self.v, v))
        )
        return replace(self, k=keys, v=values)

    def fill(self, layer: jax.Array, k: jax.Array, v: jax.Array) -> "KVCache":
        """Stores those of the first tokens, as `write` does; all sequences are empty."""
        keys, values = (
            jax.lax.dynamic_update_slice(stored, new[None], (layer, 0, 0, 0, 0))
            for stored, new in ((self.k, k), (self.v, v))
        )
        return replace(self, k=keys, v=values)

    def read(self, layer: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The keys and values of one layer, `[B, S, kv_heads, head_dim]`.

        The layer has written `count` more tokens than `lengths`. Values of further slots are 0, so
        that a probability of 0 times such a value is 0; keys are whatever is there.
        """
        k, v = (jax.lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (self.k, self.v))
        is_token = jnp.arange(self.k.shape[2]) < self.lengths[:, None] + count
        return k, jnp.where(is_token[:, :, None, None], v, 0)

    def advance(self, count: int | jax.Array) -> "KVCache":
        """The cache after every layer has stored `count` more tokens, int or int32 `[B]`."""
        return replace(self, lengths=self.lengths + count)

    def insert(self, sequence: jax.Array | int, prompt: "KVCache") -> "KVCache":
        """The cache with another sequence in place of one.

        Args:
          sequence: which one is replaced, an index below B.
          prompt: a cache of one sequence and at most this capacity, as `Transformer.prefill` makes.
        """
        k, v = (
            jax.lax.dynamic_update_slice_in_dim(into, new, sequence, axis=1)
            for into, new in ((self.k, prompt.k), (self.v, prompt.v))
        )
        return KVCache(k, v, self.lengths.at[sequence].set(prompt.lengths[0]))

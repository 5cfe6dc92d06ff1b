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
      length: int32 [], number of tokens stored, padding included.
      padding: int32 [B], number of padding tokens at the start of each sequence. Nothing attends to
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
        """A cache with room for `capacity` tokens; without `padding` no token is padding."""
        shape = (config.layers, batch, capacity, config.num_kv_heads, config.head_dim)
        k, v = jax.lax.empty(shape, config.dtype), jax.lax.empty(shape, config.dtype)
        padding = jnp.zeros(batch, jnp.int32) if padding is None else padding
        return cls(k, v, jnp.zeros((), jnp.int32), padding)

    def place(self, count: int) -> tuple[jax.Array, jax.Array]:
        """Where the next `count` tokens go.

        Returns:
          Their positions, int32 `[B, count]`, and which of the stored tokens each may attend to,
          bool `[B, 1, count, S]`: itself and earlier ones, except padding.
        """
        slots, stored = self.length + jnp.arange(count), jnp.arange(self.k.shape[2])
        positions = slots - self.padding[:, None]
        mask = (stored <= slots[:, None]) & (stored >= self.padding[:, None, None])
        return positions, mask[:, None]

    def write(self, layer: jax.Array, k: jax.Array, v: jax.Array) -> "KVCache":
        """Stores keys and values of the next tokens, `[B, T, kv_heads, head_dim]`, in one layer.

        `length` stays, as other layers follow; `advance` increases it.
        """
        start = layer, 0, self.length, 0, 0
        keys, values = (
            jax.lax.dynamic_update_slice(stored, new[None], start)
            for stored, new in ((self.k, k), (self.v, v))
        )
        return replace(self, k=keys, v=values)

    def read(self, layer: jax.Array, count: int) -> tuple[jax.Array, jax.Array]:
        """The keys and values of one layer, `[B, S, kv_heads, head_dim]`.

        The layer has written `count` more tokens than `length`. Values of further slots are 0, so
        that a probability of 0 times such a value is 0; keys are whatever is there.
        """
        k, v = (jax.lax.dynamic_index_in_dim(a, layer, keepdims=False) for a in (self.k, self.v))
        is_token = jnp.arange(self.k.shape[2]) < self.length + count
        return k, jnp.where(is_token[:, None, None], v, 0)

    def advance(self, count: int) -> "KVCache":
        """The cache after every layer has stored `count` more tokens."""
        return replace(self, length=self.length + count)

"""The key/value cache for generation."""

from collections.abc import Callable
from dataclasses import dataclass, replace

import jax
import jax.numpy as jnp

from pallas_kernels.quantised import E4M3, Operand, Quantised, rounded, values_of
from twell_jax.config import ModelConfig


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class KVCache:
    """Keys and values of the tokens seen so far, for all layers.

    Attributes:
      k, v: `[layers, B, S, kv_heads, head_dim]` in the compute dtype; S is the capacity. Slots that
        hold no token yet may hold anything, NaN too: to fill them takes 3 % of reading a prompt.
        With `kv_cache_dtype="float8"` they are `Quantised`, with a scale for each token and head,
        float32 `[layers, B, kv_heads, S]`.
      lengths: int32 [B], number of tokens stored of each sequence, in its first slots.
    """

    k: Operand
    v: Operand
    lengths: jax.Array

    @classmethod
    def empty(cls, config: ModelConfig, batch: int, capacity: int) -> "KVCache":
        """A cache with room for `capacity` tokens of each of `batch` sequences."""
        layers, kv_heads = config.layers, config.num_kv_heads
        shape = layers, batch, capacity, kv_heads, config.head_dim

        def empty() -> Operand:
            if config.kv_cache_dtype is None:
                return jax.lax.empty(shape, config.dtype)
            scale = jax.lax.empty((layers, batch, kv_heads, capacity), jnp.float32)
            return Quantised(jax.lax.empty(shape, E4M3), scale)

        return cls(empty(), empty(), jnp.zeros(batch, jnp.int32))

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

        head = jnp.arange(k.shape[2])[:, None]

        def put(into: jax.Array, new: jax.Array) -> jax.Array:
            at = into.at[layer, sequence, positions]
            if new.ndim == 3:  # scales
                at = into.at[layer, sequence[:, None], head, positions[:, None]]
            return at.set(new, unique_indices=True)

        return self._with(put, k, v)

    def fill(self, layer: jax.Array, k: jax.Array, v: jax.Array) -> "KVCache":
        """Stores those of the first tokens, as `write` does; all sequences are empty."""

        def put(into: jax.Array, new: jax.Array) -> jax.Array:
            start = layer, *(jnp.zeros_like(layer) for _ in new.shape)
            return jax.lax.dynamic_update_slice(into, new[None], start)

        return self._with(put, k, v)

    def _with(self, put: Callable, k: jax.Array, v: jax.Array) -> "KVCache":
        """The cache after `put(its array, the new one)` for keys and values, in 8 bits as it is."""

        def stored(into: Operand, new: jax.Array) -> Operand:
            if not isinstance(into, Quantised):
                return put(into, new)
            of = rounded(new)
            scale = jnp.swapaxes(of.scale[..., 0], 1, 2)  # [B, kv_heads, T]
            return Quantised(put(into.values, of.values), put(into.scale, scale))

        return replace(self, k=stored(self.k, k), v=stored(self.v, v))

    def read(
        self, layer: jax.Array, count: int, dtype: jax.typing.DTypeLike
    ) -> tuple[jax.Array, jax.Array]:
        """The keys and values of one layer, `[B, S, kv_heads, head_dim]`, in this dtype.

        The layer has written `count` more tokens than `lengths`. Values of further slots are 0, so
        that a probability of 0 times such a value is 0; keys are whatever is there.
        """

        def whole(stored: Operand) -> jax.Array:
            found = jax.tree.map(
                lambda a: jax.lax.dynamic_index_in_dim(a, layer, keepdims=False), stored
            )
            values = values_of(found)
            if isinstance(found, Quantised):
                by = jnp.swapaxes(found.scale, 1, 2)[..., None]
                values = values.astype(jnp.float32) * by
            return values.astype(dtype)

        k, v = whole(self.k), whole(self.v)
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
        k, v = jax.tree.map(
            lambda into, new: jax.lax.dynamic_update_slice_in_dim(into, new, sequence, axis=1),
            (self.k, self.v),
            (prompt.k, prompt.v),
        )
        return KVCache(k, v, self.lengths.at[sequence].set(prompt.lengths[0]))

"""Decodes sequences that come and go, each in a slot of one cache: what a server needs.

A sequence's tokens are those that `generate` would write for its prompt alone, whatever is in the
other slots. See examples/serve_queue.py.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property, partial

import jax
import jax.numpy as jnp
import numpy as np

from twell_jax.ffn.numeric import is_integer
from twell_jax.inference.flat import Structure, flattened
from twell_jax.inference.generation import ENDED, check_seed, checked_prompt, padded_length
from twell_jax.inference.sampling import Sampling, key_of, keys_of_sequences, sample_each
from twell_jax.models import (
    DECODE_OPTIONS,
    PREFILL_OPTIONS,
    KVCache,
    Transformer,
    decode,
    laid_out,
    read_prompts,
)


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Slots:
    """B places for sequences, some of them taken.

    Attributes:
      cache: the tokens of each but its last one; free slots have none.
      tokens: int32 `[B]`, the last one.
      keys: random keys `[B]`, which with a sequence's length decide its next token.
      is_taken: bool `[B]`.
    """

    cache: KVCache
    tokens: jax.Array
    keys: jax.Array
    is_taken: jax.Array


@dataclass(frozen=True)
class SlotDecoder:
    """What fills slots and lets their sequences go on.

    `insert` and `step` consume the slots that they are given: only those that they return can be
    used from then on.

    Attributes:
      model: the language model.
      capacity: tokens that a slot has room for, rounded up to a multiple of 64. A sequence that has
        filled its slot ends.
      sampling: how tokens are chosen.

    Raises:
      ValueError: the capacity is no integer or < 1.
    """

    model: Transformer
    capacity: int
    sampling: Sampling = Sampling()  # noqa: RUF009 (frozen)

    def __post_init__(self) -> None:
        _require_positive("capacity", self.capacity)

    def empty(self, count: int) -> Slots:
        """So many free slots; ValueError: the number is no integer or < 1."""
        _require_positive("count", count)
        return Slots(
            KVCache.empty(self.model.config, count, padded_length(self.capacity)),
            tokens=jnp.zeros(count, jnp.int32),
            keys=jax.random.split(key_of(0), count),
            is_taken=jnp.zeros(count, bool),
        )

    def insert(
        self, slots: Slots, slot: int, prompt: Sequence[int], *, seed: int = 0
    ) -> tuple[jax.Array, Slots]:
        """Begins a sequence in a slot, in place of what it held.

        Args:
          slots: consumed.
          slot: its index.
          prompt: token ids, at least one, and fewer than `capacity`.
          seed: as of `generate`.

        Returns:
          The first new token, int32 [], and the slots.

        Raises:
          ValueError: there is no such slot, or the prompt is empty, too long or holds a token
            outside the vocabulary, or the seed is no integer of 32 bits.
        """
        check_seed(seed)
        room = _checked(slots, slot).cache.k.shape[2]
        checked_prompt(self.model, prompt, "prompt")
        if len(prompt) >= room:
            raise ValueError(f"prompt has {len(prompt)} tokens; a slot has room for {room - 1}")
        row = np.zeros((1, padded_length(len(prompt))), np.int32)
        row[0, : len(prompt)] = prompt
        params, (begin, _) = self._compiled(len(slots.tokens))
        key = key_of(seed)
        return begin(params, slots, np.int32(slot), row, np.int32(len(prompt)), key)

    def step(self, slots: Slots) -> tuple[jax.Array, Slots]:
        """The next token of each sequence, int32 `[B]`, and the slots; `slots` are consumed.

        Free slots have `ENDED`, as has a sequence that has filled its slot, which then is free.
        """
        params, (_, go_on) = self._compiled(len(slots.tokens))
        return go_on(params, slots)

    @cached_property
    def _compiled(self) -> Callable[[int], tuple[list[jax.Array], tuple[Callable, Callable]]]:
        """A function of the number of slots that returns the parameters and the programs."""

        @cache
        def compiled(count):
            model = laid_out(self.model, count, padded_length(self.capacity))
            params, structure = flattened(model)
            return params, _programs(structure, self.sampling)

        return compiled


def free(slots: Slots, slot: int) -> Slots:
    """The slots without the sequence in one of them; ValueError: there is no such slot."""
    return replace(_checked(slots, slot), is_taken=slots.is_taken.at[slot].set(False))


def _require_positive(name: str, value: int) -> None:
    if not is_integer(value) or value < 1:
        raise ValueError(f"{name} must be an integer of at least 1, got {value!r}")


def _checked(slots: Slots, slot: int) -> Slots:
    """The slots, if they have this one."""
    count = len(slots.tokens)
    is_integral = np.issubdtype(np.asarray(slot).dtype, np.integer)  # one of JAX, too
    if not is_integral or not 0 <= slot < count:
        raise ValueError(f"slot must be an integer from 0 to {count - 1}, got {slot}")
    return slots


@cache  # a step would take longer to look for its program by a whole graph
def _programs(structure: Structure, sampling: Sampling) -> tuple[Callable, Callable]:
    """The compiled `SlotDecoder.insert` and `SlotDecoder.step` of a model."""

    @partial(jax.jit, donate_argnames="slots", compiler_options=PREFILL_OPTIONS)
    def insert(params, slots, slot, row, length, key):
        model = structure.merged(params)
        logits, prompt = read_prompts(model, row, row.shape[1], length[None])
        (key,) = keys = keys_of_sequences(key, 1)
        (token,) = sample_each(logits, keys, prompt.lengths, sampling)
        return token, Slots(
            slots.cache.insert(slot, prompt),
            slots.tokens.at[slot].set(token),
            slots.keys.at[slot].set(key),
            slots.is_taken.at[slot].set(True),
        )

    @partial(jax.jit, donate_argnames="slots", compiler_options=DECODE_OPTIONS)
    def step(params, slots):
        room, lengths = slots.cache.k.shape[2], slots.cache.lengths
        goes_on = slots.is_taken & (lengths < room)
        # All slots get a token; where none goes on, it lies where the next prompt begins.
        cache = replace(slots.cache, lengths=jnp.where(goes_on, lengths, 0))
        logits, cache = decode(structure.merged(params), slots.tokens[:, None], cache)
        tokens = sample_each(logits, slots.keys, cache.lengths, sampling)
        new = jnp.where(goes_on, tokens, ENDED)
        return new, replace(slots, cache=cache, tokens=tokens, is_taken=goes_on)

    return insert, step

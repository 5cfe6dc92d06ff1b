"""Chooses the next token: the most likely one, or by temperature, top-k, top-p and min-p."""

import math
from dataclasses import dataclass

import jax
import jax.numpy as jnp

from twell_jax.ffn.numeric import is_integer, is_number


@dataclass(frozen=True)
class Sampling:
    """A way to choose tokens; the default draws from the model's own distribution.

    Attributes:
      temperature: divides the logits; 0 takes the most likely token.
      top_k: keeps only the k most likely tokens; None keeps all.
      top_p: keeps only the fewest most likely tokens whose probabilities sum to at least p (nucleus
        sampling, arXiv 1904.09751).
      min_p: keeps only tokens with at least min_p times the probability of the most likely one
        (arXiv 2407.01082).

    top_k acts first; top_p and min_p act on the tokens that it keeps, as in Hugging Face's
    transformers.

    Raises:
      ValueError: temperature is neither 0 nor in [1e-6, 1e6], top_k not in [1, 2^31), top_p not in
        (0, 1], min_p not in [0, 1], or one is no number, as True.
    """

    temperature: float = 1.0
    top_k: int | None = None
    top_p: float = 1.0
    min_p: float = 0.0

    def __post_init__(self):
        for name in ("temperature", "top_p", "min_p"):
            if not is_number(value := getattr(self, name)):
                raise ValueError(f"{name} must be a number, got {value!r}")
        # Beyond these limits logits in float32 may become inf or equal.
        if self.temperature != 0 and not 1e-6 <= self.temperature <= 1e6:
            raise ValueError(f"temperature must be 0 or from 1e-6 to 1e6, got {self.temperature}")
        if self.top_k is not None and not (is_integer(self.top_k) and 1 <= self.top_k < 2**31):
            raise ValueError(f"top_k must be an integer from 1 to 2^31 - 1, got {self.top_k!r}")
        if not 0 < self.top_p <= 1:
            raise ValueError(f"top_p must be in (0, 1], got {self.top_p}")
        if not 0 <= self.min_p <= 1:
            raise ValueError(f"min_p must be in [0, 1], got {self.min_p}")


GREEDY = Sampling(temperature=0.0)


def sample(logits: jax.Array, key: jax.Array, sampling: Sampling) -> jax.Array:
    """Chooses a token for each row of `logits: float32 [B, vocab]`; returns int32 `[B]`."""
    if sampling.temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    scores = logits / sampling.temperature
    # A token has the same noise whichever others are kept.
    noise = jax.random.gumbel(key, scores.shape, scores.dtype)
    order = None
    if sampling.top_k is not None:
        scores, order = jax.lax.top_k(scores, min(sampling.top_k, scores.shape[-1]))
    elif sampling.top_p < 1:
        order = jnp.argsort(-scores, axis=-1)
        scores = jnp.take_along_axis(scores, order, axis=-1)
    if order is not None:
        noise = jnp.take_along_axis(noise, order, axis=-1)
    kept = jnp.where(_kept(scores, sampling), scores, -jnp.inf)
    drawn = jnp.argmax(kept + noise, axis=-1)
    if order is not None:
        drawn = jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0]
    return drawn.astype(jnp.int32)


def key_of(seed: int | jax.Array) -> jax.Array:
    """The random key of a seed, of the default kind whatever `jax_default_prng_impl` says.

    With others, such as "rbg", what `sample_each` draws for a row depends on the rows beside it.
    """
    return jax.random.key(seed, impl="threefry2x32")


def keys_of_sequences(key: jax.Array, count: int) -> jax.Array:
    """Random keys `[count]` for `sample_each`; that of a sequence does not depend on `count`."""
    return jax.vmap(jax.random.fold_in, (None, 0))(key, jnp.arange(count))


def sample_each(
    logits: jax.Array, keys: jax.Array, lengths: jax.Array, sampling: Sampling
) -> jax.Array:
    """`sample` for rows of which none depends on the others.

    Args:
      logits: float32 `[B, vocab]`.
      keys: random keys `[B]`, one for each sequence.
      lengths: int32 `[B]`, their tokens so far, so that each token is drawn anew.
      sampling: how tokens are chosen.
    """

    def of_row(row, key, length):
        return sample(row[None], jax.random.fold_in(key, length), sampling)[0]

    return jax.vmap(of_row)(logits, keys, lengths)


def _kept(scores: jax.Array, sampling: Sampling) -> jax.Array | bool:
    """Which tokens of `scores: [B, N]` may be drawn; for top_p they descend."""
    kept: jax.Array | bool = True
    if sampling.top_p < 1:
        # A token stays if the probabilities before it do not reach top_p.
        probability = jax.nn.softmax(scores, axis=-1)
        kept &= jnp.cumsum(probability, axis=-1) - probability < sampling.top_p
    if sampling.min_p > 0:
        kept &= scores >= jnp.max(scores, axis=-1, keepdims=True) + math.log(sampling.min_p)
    return kept

"""Continues a batch of token sequences, and turns new tokens into text as they come."""

from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx

from twell_jax.data.tokenizers import Tokenizer
from twell_jax.inference.sampling import Sampling, sample
from twell_jax.models import DECODE_OPTIONS, PREFILL_OPTIONS, Transformer, decode

_MULTIPLE = 64
ENDED = -1  # in place of the next token, for a sequence that has ended


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    stop_ids: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Continues a batch of prompts, one token of each at a time.

    Args:
      model: the language model.
      prompts: token ids, at least one for each prompt; prompts may differ in length.
      max_tokens: the most tokens to append to each.
      sampling: how tokens are chosen.
      stop_ids: tokens that end a sequence; they are not yielded.
      seed: the same seed gives the same tokens for the same prompts.

    Yields:
      int `[B]`, the next token of each sequence, or `ENDED` (-1) for a sequence that has ended.
      Stops when all have ended.

    Raises:
      ValueError: there is no prompt, a prompt is empty, max_tokens < 0, or the seed does not fit
        into 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if not len(prompts) or not all(map(len, prompts)) or max_tokens < 0:
        raise ValueError(
            "there must be a prompt, each must have a token, and max_tokens must be at least 0, "
            f"got {[len(prompt) for prompt in prompts]} tokens and max_tokens={max_tokens}"
        )
    return _generate(model, prompts, max_tokens, sampling, stop_ids, seed)


def padded_length(length: int) -> int:
    """The next multiple of 64. Padding to it keeps the number of compiled programs small."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def cache_capacity(prompt: int, max_tokens: int) -> int:
    """Tokens that the cache of `generate` has room for, for prompts of at most `prompt` tokens."""
    return padded_length(padded_length(prompt) + max_tokens)


def _generate(model, prompts, max_tokens, sampling, stop_ids, seed):
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = padded_length(lengths.max())
    padding = width - lengths if (lengths < width).any() else None
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    graph, params = nnx.split(model)
    key, ended = jax.random.key(seed), np.zeros(len(prompts), bool)
    capacity = cache_capacity(width, max_tokens)
    following = _prefill(graph, params, tokens, padding, key, capacity=capacity, sampling=sampling)
    for step in range(max_tokens):
        token, cache = following
        if step + 1 < max_tokens:  # enqueued before the host waits for this step's tokens
            following = _extend(graph, params, token, cache, key, sampling=sampling)
        ids = np.asarray(token)
        ended |= np.isin(ids, stop_ids)
        if ended.all():
            return
        yield np.where(ended, ENDED, ids)


@partial(
    jax.jit,
    static_argnames=("graph", "capacity", "sampling"),
    compiler_options=PREFILL_OPTIONS,
)
def _prefill(graph, params, tokens, padding, key, *, capacity, sampling):
    """The first new token of each row, int32 [B], and a cache with room for `capacity` tokens."""
    logits, cache = nnx.merge(graph, params).prefill(tokens, capacity, padding)
    return sample(logits, jax.random.fold_in(key, cache.length), sampling), cache


@partial(
    jax.jit,
    static_argnames=("graph", "sampling"),
    donate_argnames="cache",
    compiler_options=DECODE_OPTIONS,
)
def _extend(graph, params, token, cache, key, *, sampling):
    """The token after `token` of each row, and the cache extended by `token`."""
    logits, cache = decode(nnx.merge(graph, params), token[:, None], cache)
    return sample(logits, jax.random.fold_in(key, cache.length), sampling), cache


def stream_text(
    tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Iterable[int]
) -> Iterator[str]:
    """Yields the text of `new_ids`, which follow a prompt, piece by piece.

    A piece ends at the end of a character, whose bytes may be spread over several tokens.
    """
    ids, shown = list(prompt), len(tokenizer.decode(prompt))
    for token in new_ids:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else the last character still lacks bytes
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]

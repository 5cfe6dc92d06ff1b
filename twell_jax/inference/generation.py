"""Continues a batch of token sequences, and turns new tokens into text as they come."""

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from itertools import islice
from typing import Any, NamedTuple

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from twell_jax.config import ModelConfig
from twell_jax.data.tokenizers import Tokenizer, is_fallback_byte, start_of_text
from twell_jax.ffn.numeric import is_integer
from twell_jax.inference import traces
from twell_jax.inference.flat import Structure, flattened
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

_MULTIPLE = 64
# Steps of one program; they divide `_MULTIPLE`. For one sequence the host limits, and what a call
# takes it is shared by them.
_TOGETHER = 4
_CONTEXT = 16  # tokens of a prompt, or more, with which new ones decode as they do after all of it
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
      Stops when all have ended. After the first, tokens come from the device four at a time.

    Raises:
      ValueError: there is no prompt, a prompt is empty or holds a token outside the vocabulary,
        max_tokens < 0 or no integer, or the seed no integer of 32 bits.
    """
    check_seed(seed)
    if not is_integer(max_tokens):
        raise ValueError(f"max_tokens must be an integer, got {max_tokens!r}")
    if not len(prompts) or not all(map(len, prompts)) or max_tokens < 0:
        raise ValueError(
            "there must be a prompt, each must have a token, and max_tokens must be at least 0, "
            f"got {[len(prompt) for prompt in prompts]} tokens and max_tokens={max_tokens}"
        )
    for number, prompt in enumerate(prompts):
        checked_prompt(model, prompt, f"prompts[{number}]")
    return _generate(model, prompts, max_tokens, sampling, [*stop_ids], seed)


def prepare(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
) -> None:
    """Begins to compile what `generate` will call, in another thread; it waits for that.

    Args:
      model: may have `jax.ShapeDtypeStruct`s as parameters, while these are read.
      prompts, max_tokens, sampling: those of the call.
    """
    if max_tokens > 1:
        tokens, lengths = _padded(prompts)
        capacity = cache_capacity(tokens.shape[1], max_tokens)
        params, programs = _programs_of(model, len(tokens), capacity, sampling)
        reads = params, tokens, lengths, np.uint32(0)
        pool = ThreadPoolExecutor(1)
        programs.ready[tokens.shape, capacity] = pool.submit(
            _compile_both, programs, reads, capacity
        )
        pool.shutdown(wait=False)


def check_seed(seed: int) -> None:
    """Raises a `ValueError` unless the seed is an integer of 32 bits."""
    if not is_integer(seed) or not 0 <= seed < 2**32:
        raise ValueError(f"seed must be an integer from 0 to 2**32 - 1, got {seed!r}")


def checked_prompt(model: Transformer, prompt: Sequence[int], name: str) -> None:
    """Raises a `ValueError` that names a prompt unless it holds tokens of the vocabulary alone.

    In place of another's embedding, the model would read NaN or that of another token.
    """
    ids = np.asarray(prompt)
    if not ids.size or not np.issubdtype(ids.dtype, np.integer):
        raise ValueError(f"{name} must hold token ids, got {ids.dtype if ids.size else 'none'}")
    if ids.ndim != 1:
        raise ValueError(f"{name} must be a sequence of token ids, got an array {list(ids.shape)}")
    if (outside := ids[(ids < 0) | (ids >= model.config.vocab_size)]).size:
        raise ValueError(
            f"{name} holds token {outside[0]}, but the model's vocabulary is 0 to "
            f"{model.config.vocab_size - 1}"
        )


def padded_length(length: int) -> int:
    """The next multiple of 64. Padding to it keeps the number of compiled programs small."""
    return -(-length // _MULTIPLE) * _MULTIPLE


def cache_capacity(prompt: int, max_tokens: int) -> int:
    """Tokens that the cache of `generate` has room for, for prompts of at most `prompt` tokens."""
    return padded_length(padded_length(prompt) + max_tokens)


def _generate(model, prompts, max_tokens, sampling, stop_ids, seed):
    ended = np.zeros(len(prompts), bool)
    calls = _calls(model, *_padded(prompts), max_tokens, sampling, seed)
    for ids in islice(_ahead(calls), max_tokens):
        ended |= np.isin(ids, stop_ids)
        if ended.all():
            return
        yield np.where(ended, ENDED, ids)


def _padded(prompts: Sequence[Sequence[int]]) -> tuple[np.ndarray, np.ndarray]:
    """Prompts with zeros at their ends, int32 [B, T], and their lengths, int32 [B]."""
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    tokens = np.zeros((len(prompts), padded_length(int(lengths.max()))), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[: len(prompt)] = prompt
    return tokens, lengths


def _calls(model, tokens, lengths, max_tokens, sampling, seed):
    """Enqueues a call whenever it is asked for one, and yields its tokens, int32 [steps, B].

    The last one may go past `max_tokens`. The cache has room for that, as its capacity and the
    width of the padded prompts are multiples of `_TOGETHER`.
    """
    capacity = cache_capacity(tokens.shape[1], max_tokens)
    params, programs = _programs_of(model, len(tokens), capacity, sampling)
    reads = params, tokens, lengths, jax.device_put(np.uint32(seed))  # once, not in each call
    if max_tokens == 1:
        token, _ = programs.prefill(capacity, reads).call(*reads)
        yield token[None]
        return
    if (both := programs.ready.get((tokens.shape, capacity))) is None:
        both = Future()
        both.set_result(_compile_both(programs, reads, capacity))
        programs.ready[tokens.shape, capacity] = both
    prefill, compiled = both.result()
    token, stored = prefill(*reads)
    yield token[None]
    extend = compiled.result()
    for _ in range(1, max_tokens, _TOGETHER):
        token, new, stored = extend(params, token, stored, reads[-1])
        new.copy_to_host_async()
        yield new


def _compile_both(programs: "_Programs", reads: tuple, capacity: int) -> tuple[Any, Future]:
    """What reads prompts, compiled, and what appends tokens, once it is compiled, too."""
    params, *_, seed = reads
    prefill, binds = programs.prefill(capacity, reads)
    of_prefill = prefill.eval_shape(*reads)
    lowered = prefill.lower(*reads)  # first, as Python runs one thread at a time

    def compile_extend():
        place = SingleDeviceSharding(jax.devices()[0]) if binds else None
        place = next((param.sharding for param in params if _is_bound(param)), place)
        is_known = isinstance(place, SingleDeviceSharding | None)
        token, stored = jax.tree.map(
            lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=place if is_known else None),
            of_prefill,
        )
        extend, _ = programs.extend((params, token, stored, seed))
        if is_known:  # else the shardings of what `prefill` returns are XLA's choice
            extend.lower(params, token, stored, seed).compile()
        return extend

    pool = ThreadPoolExecutor(1)
    compiled = pool.submit(compile_extend)
    pool.shutdown(wait=False)
    lowered.compile()
    return prefill, compiled


def _ahead(calls: Iterator[jax.Array]) -> Iterator[np.ndarray]:
    """The tokens of each step; while the host waits for a call, the device has the next one."""
    queue: deque[jax.Array] = deque()
    try:
        for number, tokens in enumerate(calls):
            queue.append(tokens)
            # The first token waits for nothing but the prompts.
            if number == 0 or len(queue) > 1:
                yield from np.asarray(queue.popleft())
        while queue:
            yield from np.asarray(queue.popleft())
    finally:
        jax.block_until_ready(list(queue))  # else what the caller times next would include them


def _is_bound(param: jax.Array | jax.ShapeDtypeStruct) -> bool:
    """Whether a parameter is bound to devices."""
    return param.committed if isinstance(param, jax.Array) else param.sharding is not None


class _Programs(NamedTuple):
    """The jitted calls of a model.

    Attributes:
      prefill: (the cache's capacity, arguments or their shapes) -> what reads prompts.
      extend: arguments or their shapes -> what appends tokens.
      ready: of each shape of the prompts with a capacity, the results of `_compile_both`.
    """

    prefill: Callable[[int, tuple], traces.Jitted]
    extend: Callable[[tuple], traces.Jitted]
    ready: dict[tuple, Future[tuple[Any, Future]]]


def _programs_of(
    model: Transformer, batch: int, capacity: int, sampling: Sampling
) -> tuple[list, _Programs]:
    """The parameters as the programs take them, and these."""
    params, structure = flattened(laid_out(model, batch, capacity))
    return params, _programs(structure, model.config, sampling)


@cache  # a step would take longer to look for its program by a whole graph
def _programs(structure: Structure, config: ModelConfig, sampling: Sampling) -> _Programs:
    """Those of a model."""
    jitted: dict[tuple, traces.Jitted] = {}

    def prefill_with(capacity: int) -> Any:
        def prefill(params, tokens, lengths, seed):
            """The first new token of each row, int32 [B], and a cache for `capacity` tokens."""
            model = structure.merged(params)
            logits, stored = read_prompts(model, tokens, capacity, lengths)
            keys = keys_of_sequences(key_of(seed), len(tokens))
            return sample_each(logits, keys, stored.lengths, sampling), stored

        return prefill

    def extend(params, token, stored, seed):
        """Appends to each row the tokens after `token: int32 [B]`, each of which the cache takes.

        Returns the last of them, int32 [B], all, [_TOGETHER, B], and the extended cache.
        """
        model, keys = structure.merged(params), keys_of_sequences(key_of(seed), len(token))

        def step(carry, _):
            token, stored = carry
            logits, stored = decode(model, token[:, None], stored)
            token = sample_each(logits, keys, stored.lengths, sampling)
            return (token, stored), token

        (token, stored), new = jax.lax.scan(step, (token, stored), length=_TOGETHER)
        return token, new, stored

    def once(function: Any, args: tuple, of: tuple, results: Any, **options: Any) -> traces.Jitted:
        shapes = tuple((a.shape, a.dtype) for a in jax.tree.leaves(args))
        if (of, shapes) not in jitted:
            jitted[of, shapes] = traces.jit(
                function, args, (structure, sampling, *of), results, **options
            )
        return jitted[of, shapes]

    def of_prompts(capacity: int, reads: tuple) -> traces.Jitted:
        cache = jax.eval_shape(lambda: KVCache.empty(config, len(reads[1]), capacity))
        function, of = prefill_with(capacity), ("prefill", capacity)
        return once(function, reads, of, (0, cache), compiler_options=PREFILL_OPTIONS)

    def of_tokens(args: tuple) -> traces.Jitted:
        options = {"donate_argnums": 2, "compiler_options": DECODE_OPTIONS}
        return once(extend, args, ("extend",), (0, 0, args[2]), **options)

    return _Programs(of_prompts, of_tokens, {})


def stream_text(
    tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Iterable[int]
) -> Iterator[str]:
    """Yields the text of `new_ids`, which follow a prompt, piece by piece.

    All pieces together are what decoding prompt and new ids at once gives, from where that differs
    from decoding the prompt. A piece ends where no later token changes it: at the end of a
    character, whose bytes may be spread over several tokens, and with byte fallback at the end of
    all bytes that follow each other.
    """
    start, before = len(prompt), ""
    while start and not before.strip("\ufffd"):  # what precedes a whole character changes nothing
        start = start_of_text(tokenizer, prompt, max(start - _CONTEXT, 0))
        before = tokenizer.decode(prompt[start:])
    context, piece = list(prompt[start:]), []
    for token in new_ids:
        piece.append(token)
        text = _following(before, tokenizer.decode([*context, *piece]))
        if text and not text.endswith("\ufffd") and _ends_a_text(tokenizer, piece):
            yield text
            context, piece = piece, []
            before = tokenizer.decode(context)
    yield _following(before, tokenizer.decode([*context, *piece]))


def _following(before: str, text: str) -> str:
    """What a text has beyond the one before it, whose last character may have lacked bytes."""
    while not text.startswith(before):
        before = before[:-1]
    return text.removeprefix(before)


def _ends_a_text(tokenizer: Tokenizer, ids: Sequence[int]) -> bool:
    """Whether the last of the ids that have a text is no byte that belongs to those after it."""
    for token in reversed(ids):
        if is_fallback_byte(tokenizer, token):
            return False
        if tokenizer.decode([token]):
            return True
    return False

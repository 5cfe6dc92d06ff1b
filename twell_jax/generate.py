"""Continues text: python -m twell_jax.generate DIRECTORY --prompt "def "

DIRECTORY is a run of train.py or a model in Hugging Face's format. The text is printed as it comes,
and then, on stderr, the rates of reading the prompts (prefill) and of writing (decode).
"""

import argparse
import itertools
import sys
import time
from collections.abc import Iterable, Iterator, Sequence
from functools import partial

import jax
import numpy as np
from flax import nnx

from twell_jax.data.tokenizers import Tokenizer
from twell_jax.inference import language_model
from twell_jax.inference.sampling import Sampling, sample
from twell_jax.models.transformer import KVCache, Transformer
from twell_jax.train.checkpoint import CheckpointError

_MULTIPLE = 64  # lengths of prompts are padded to one, so that few of them are compiled
ENDED = -1  # in place of an id


def generate(
    model: Transformer,
    prompts: Sequence[Sequence[int]],
    *,
    max_tokens: int,
    sampling: Sampling = Sampling(),  # noqa: B008 (frozen)
    stop_ids: Sequence[int] = (),
    seed: int = 0,
) -> Iterator[np.ndarray]:
    """Continues a batch of prompts, a token of each at a time.

    Args:
      model: the language model.
      prompts: token ids, at least one for each; they may differ in length.
      max_tokens: how many to append to each at most.
      sampling: how tokens are chosen.
      stop_ids: tokens after which a sequence has ended (they are not yielded).
      seed: the same seed gives the same tokens for the same prompts.

    Yields:
      int `[B]`, the next token of each sequence, or `ENDED` (-1) for those that have. Stops when
      all have.

    Raises:
      ValueError: there is no prompt, an empty one, max_tokens < 0, or a seed beyond 32 bits.
    """
    if not 0 <= seed < 2**32:
        raise ValueError(f"seed must be from 0 to 2**32 - 1, got {seed}")
    if not len(prompts) or not all(map(len, prompts)) or max_tokens < 0:
        raise ValueError(
            "there must be a prompt, each must have a token, and max_tokens must be at least 0, "
            f"got {[len(prompt) for prompt in prompts]} tokens and max_tokens={max_tokens}"
        )
    return _generate(model, prompts, max_tokens, sampling, stop_ids, seed)


def _generate(model, prompts, max_tokens, sampling, stop_ids, seed):
    lengths = np.array([len(prompt) for prompt in prompts], np.int32)
    width = -(-lengths.max() // _MULTIPLE) * _MULTIPLE
    tokens = np.zeros((len(prompts), width), np.int32)
    for row, prompt in zip(tokens, prompts, strict=True):
        row[width - len(prompt) :] = prompt
    graph, params = nnx.split(model)
    key, ended = jax.random.key(seed), np.zeros(len(prompts), bool)
    following = _prefill(
        graph, params, tokens, width - lengths, key, capacity=width + max_tokens, sampling=sampling
    )
    for step in range(max_tokens):
        token, cache = following
        if step + 1 < max_tokens:  # enqueued before the host waits for this step's tokens
            following = _extend(graph, params, token, cache, key, sampling=sampling)
        ids = np.asarray(token)
        ended |= np.isin(ids, stop_ids)
        if ended.all():
            return
        yield np.where(ended, ENDED, ids)


@partial(jax.jit, static_argnames=("graph", "capacity", "sampling"))
def _prefill(graph, params, tokens, padding, key, *, capacity, sampling):
    """The first new token of each row, int32 [B], and a cache of that capacity."""
    model = nnx.merge(graph, params)
    # Among the prompts' tokens alone, attention can be a fused one; room for more comes after.
    cache = KVCache.empty(model.config, *tokens.shape, padding)
    logits, cache = model.decode(tokens, cache)
    return sample(logits, jax.random.fold_in(key, cache.length), sampling), cache.grow(capacity)


@partial(jax.jit, static_argnames=("graph", "sampling"), donate_argnames="cache")
def _extend(graph, params, token, cache, key, *, sampling):
    logits, cache = nnx.merge(graph, params).decode(token[:, None], cache)
    return sample(logits, jax.random.fold_in(key, cache.length), sampling), cache


def stream_text(
    tokenizer: Tokenizer, prompt: Sequence[int], new_ids: Iterable[int]
) -> Iterator[str]:
    """The text of `new_ids`, which follow a prompt, in pieces: each as soon as it is certain."""
    ids, shown = list(prompt), len(tokenizer.decode(prompt))
    for token in new_ids:
        ids.append(token)
        text = tokenizer.decode(ids)
        if not text.endswith("\ufffd"):  # else the bytes of a character are not complete
            yield text[shown:]
            shown = len(text)
    yield tokenizer.decode(ids)[shown:]


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("directory", help="of a run, such as runs/tiny, or with a config.json")
    parser.add_argument(
        "--prompt", required=True, action="append", help="text to continue; may be repeated"
    )
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, help="sample among the k most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling")
    parser.add_argument("--min-p", type=float, default=0.0, help="relative to the most likely")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--implementation", choices=("xla", "mosaic"), help="of the FFN")
    args = parser.parse_args()
    try:
        _print_continuations(args)
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _print_continuations(args: argparse.Namespace) -> None:
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    lm = language_model.load(args.directory, args.implementation)
    prompts = [lm.encode(prompt) for prompt in args.prompt]
    steps = partial(
        generate,
        lm.model,
        prompts,
        max_tokens=args.max_tokens,
        sampling=sampling,
        stop_ids=lm.stop_ids,
        seed=args.seed,
    )
    for _ in itertools.islice(steps(), 2):  # compiles, so that the rates are those of the work
        pass
    start, history = time.perf_counter(), []

    def first_sequence():
        for ids in steps():
            history.append((time.perf_counter(), ids))
            if ids[0] != ENDED:
                yield ids[0]

    print(args.prompt[0], end="", flush=True)
    for piece in stream_text(lm.tokenizer, prompts[0], first_sequence()):
        print(piece, end="", flush=True)
    print()
    times = [t for t, _ in history]
    tokens = np.array([ids for _, ids in history], int).reshape(-1, len(prompts))
    for row in range(1, len(prompts)):
        ids = tokens[tokens[:, row] != ENDED, row]
        print("---\n" + args.prompt[row], *stream_text(lm.tokenizer, prompts[row], ids), sep="")
    if len(times) > 1:
        read, written = sum(map(len, prompts)), np.sum(tokens[1:] != ENDED)
        print(
            f"prefill: {read} tokens, {read / (times[0] - start):,.0f} tokens/s; "
            f"decode: {written} tokens, {written / (times[-1] - times[0]):,.0f} tokens/s",
            file=sys.stderr,
        )


if __name__ == "__main__":
    main()

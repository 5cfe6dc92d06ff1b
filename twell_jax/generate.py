"""Samples text from a trained run: python -m twell_jax.generate RUN_DIR --prompt "def " """

import argparse
import sys
from collections.abc import Iterator
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from twell_jax.checkpoint import CheckpointError
from twell_jax.config import ConfigError
from twell_jax.model import KVCache, Transformer
from twell_jax.run import load_run


def generate(
    model: Transformer,
    prompt: np.ndarray,
    *,
    max_tokens: int,
    stop_id: int | None = None,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
    seed: int = 0,
) -> Iterator[int]:
    """Continues a prompt, a token at a time.

    Args:
      model: the language model.
      prompt: int `[T]`, at least one token.
      max_tokens: how many to sample at most.
      stop_id: the token after which to stop (it is not yielded).
      temperature, top_k, top_p: see `sample`.
      seed: the same seed gives the same tokens.

    Yields:
      The ids of the sampled tokens.

    Raises:
      ValueError: there is no prompt, or max_tokens < 0; and as `sample` does.
    """
    if not len(prompt) or max_tokens < 0:
        raise ValueError(
            f"the prompt must have a token and max_tokens be at least 0, got {len(prompt)} tokens "
            f"and max_tokens={max_tokens}"
        )
    choose = partial(sample, temperature=temperature, top_k=top_k, top_p=top_p)

    @jax.jit
    def extend(model, tokens, cache, key):
        logits, cache = model.decode(tokens, cache)
        return choose(logits, key), cache

    cache = KVCache.empty(model.config, batch=1, capacity=len(prompt) + max_tokens)
    tokens = jnp.asarray(prompt, jnp.int32)[None]
    for key in jax.random.split(jax.random.key(seed), max_tokens):
        token, cache = extend(model, tokens, cache, key)
        if int(token[0]) == stop_id:
            return
        yield int(token[0])
        tokens = token[:, None]


def sample(
    logits: jax.Array,
    key: jax.Array,
    *,
    temperature: float = 1.0,
    top_k: int | None = None,
    top_p: float = 1.0,
) -> jax.Array:
    """Draws a token for each row of `logits: float32 [B, vocab]`; returns int32 `[B]`.

    Args:
      key: a `jax.random.key`.
      temperature: divides the logits; 0 takes the most likely token.
      top_k: only the k most likely tokens, if given.
      top_p: only the fewest most likely tokens whose probabilities sum to at least p (nucleus
        sampling, arXiv 1904.09751).

    Raises:
      ValueError: temperature < 0, top_k < 1, or top_p outside (0, 1].
    """
    if not temperature >= 0:
        raise ValueError(f"temperature must be at least 0, got {temperature}")
    if top_k is not None and top_k < 1:
        raise ValueError(f"top_k must be at least 1, got {top_k}")
    if not 0 < top_p <= 1:
        raise ValueError(f"top_p must be in (0, 1], got {top_p}")
    if temperature == 0:
        return jnp.argmax(logits, axis=-1).astype(jnp.int32)
    # Sorted from the most likely down; a token stays if those before it have not reached p.
    order = jnp.argsort(-logits, axis=-1)
    sorted_logits = jnp.take_along_axis(logits, order, axis=-1) / temperature
    probability = jax.nn.softmax(sorted_logits, axis=-1)
    kept = jnp.cumsum(probability, axis=-1) - probability < top_p
    kept &= jnp.arange(logits.shape[-1]) < (top_k or logits.shape[-1])
    drawn = jax.random.categorical(key, jnp.where(kept, sorted_logits, -jnp.inf))
    return jnp.take_along_axis(order, drawn[:, None], axis=-1)[:, 0].astype(jnp.int32)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("run_dir", help="directory of a run, such as runs/tiny")
    parser.add_argument("--prompt", required=True, help="text to continue")
    parser.add_argument("--max-tokens", type=int, default=200)
    parser.add_argument("--temperature", type=float, default=0.8, help="0 is greedy")
    parser.add_argument("--top-k", type=int, help="sample among the k most likely tokens")
    parser.add_argument("--top-p", type=float, default=1.0, help="nucleus sampling")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    try:
        _, tokenizer, model = load_run(args.run_dir)
        # An empty prompt continues the end of the text before it.
        prompt = tokenizer.encode([args.prompt])[0] if args.prompt else [tokenizer.eot_id]
        tokens = generate(
            model,
            np.asarray(prompt),
            max_tokens=args.max_tokens,
            stop_id=tokenizer.eot_id,
            temperature=args.temperature,
            top_k=args.top_k,
            top_p=args.top_p,
            seed=args.seed,
        )
        print(args.prompt + tokenizer.decode(list(tokens)))
    except (ConfigError, CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

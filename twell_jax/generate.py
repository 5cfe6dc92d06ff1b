"""Continues text: python -m twell_jax.generate DIRECTORY --prompt "def "

DIRECTORY is a run of train.py or a model in Hugging Face's format. Where there is no such
directory, it is a name on the Hugging Face hub, org/name or org/name@revision (extra "hf").

The text is printed as it comes, and then, on stderr, two rates: of reading the prompts up to the
first new tokens (prefill), and of writing the others (decode), without compilation. A last line
says what computes the latter, and why.
"""

import argparse
import gc
import itertools
import sys
from collections.abc import Sequence
from functools import partial
from typing import get_args

import numpy as np

from twell_jax.ffn import Implementation
from twell_jax.inference import language_model, traces
from twell_jax.inference.arguments import DIRECTORY, at_least, command_line, unicode_text
from twell_jax.inference.generation import ENDED, cache_capacity, generate, prepare, stream_text
from twell_jax.inference.rates import Timed
from twell_jax.inference.sampling import Sampling
from twell_jax.models import Transformer, explain_decoding
from twell_jax.train import compilation_cache, interrupt, memory, utf8
from twell_jax.train.checkpoint_errors import CheckpointError


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = command_line(__doc__, compilation_cache.HELP)
    parser.add_argument("directory", help=DIRECTORY)
    parser.add_argument(
        "--prompt",
        type=unicode_text,
        required=True,
        action="append",
        help="text to continue; may be repeated",
    )
    parser.add_argument(
        "--special-tokens",
        action="store_true",
        help="read special tokens that are written in a prompt, such as <|im_start|>, as tokens, "
        "and add none: for prompts in the format of a chat",
    )
    parser.add_argument(
        "--max-tokens",
        type=at_least(0),
        default=200,
        help="new tokens at most (default: %(default)s)",
    )
    parser.add_argument(
        "--temperature", type=float, default=0.8, help="0 is greedy (default: %(default)s)"
    )
    parser.add_argument(
        "--top-k", type=at_least(1), help="sample among the k most likely tokens (default: all)"
    )
    parser.add_argument(
        "--top-p", type=float, default=1.0, help="nucleus sampling (default: %(default)s, none)"
    )
    parser.add_argument(
        "--min-p",
        type=float,
        default=0.0,
        help="relative to the most likely (default: %(default)s, none)",
    )
    parser.add_argument(
        "--seed", type=at_least(0), default=0, help="of the samples (default: %(default)s)"
    )
    parser.add_argument(
        "--implementation",
        choices=get_args(Implementation),
        help="of the FFN (default: the faster one)",
    )
    parser.add_argument(
        "--kv-cache-dtype",
        choices=["float8"],
        help="of the keys and values that are stored (default: as the run says, or that of the "
        "compute)",
    )
    args = parser.parse_args(argv)
    gc.freeze()  # collections then need not look at all that is imported
    try:
        with interrupt.at_once():
            compilation_cache.enable()
            traces.enable()
            _print_continuations(args)
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


def _check_length(model: Transformer, prompt: int, max_tokens: int, sequences: int) -> None:
    """Warns beyond the model's context; raises ConfigError if memory cannot hold the tokens."""
    capacity = cache_capacity(prompt, max_tokens)
    memory.require_for_generation(model.config, sequences, capacity, memory.of_device())
    if prompt + max_tokens > model.config.context:
        print(
            f"warning: {prompt} tokens of the prompt and --max-tokens {max_tokens} exceed the "
            f"{model.config.context} of the model's context; beyond it text is worse",
            file=sys.stderr,
        )


def _print_continuations(args: argparse.Namespace) -> None:
    sampling = Sampling(args.temperature, args.top_k, args.top_p, args.min_p)
    how = {"max_tokens": args.max_tokens, "sampling": sampling}

    def encoded(lm: language_model.LanguageModel) -> list[list[int]]:
        return [lm.encode(prompt, special_tokens=args.special_tokens) for prompt in args.prompt]

    lm = language_model.load(
        args.directory,
        args.implementation,
        meanwhile=lambda lm: prepare(lm.model, encoded(lm), **how),
        kv_cache_dtype=args.kv_cache_dtype,
    )
    prompts = encoded(lm)
    _check_length(lm.model, max(map(len, prompts)), args.max_tokens, len(prompts))
    steps = partial(
        generate,
        lm.model,
        prompts,
        **how,
        stop_ids=lm.stop_ids,
        seed=args.seed,
    )
    for _ in itertools.islice(steps(), 2):  # compiles, so that the rates do not include it
        pass
    timed = Timed(steps())
    print(args.prompt[0], end="", flush=True)
    first = (ids[0] for ids in timed if ids[0] != ENDED)
    for piece in stream_text(lm.tokenizer, prompts[0], first):
        print(piece, end="", flush=True)
    print()
    tokens = np.array(timed.tokens, int).reshape(-1, len(prompts))
    for row in range(1, len(prompts)):
        ids = tokens[tokens[:, row] != ENDED, row]
        print("---\n" + args.prompt[row], *stream_text(lm.tokenizer, prompts[row], ids), sep="")
    if rates := timed.rates(prompts):
        print(rates, file=sys.stderr)
        capacity = cache_capacity(max(map(len, prompts)), args.max_tokens)
        print(explain_decoding(lm.model, len(prompts), capacity), file=sys.stderr)


if __name__ == "__main__":
    main()

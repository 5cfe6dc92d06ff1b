"""Writes a model in Hugging Face's format, with a model card: python -m twell_jax.export RUN OUT

transformers loads it as a Llama, or as what the model is otherwise: see docs/huggingface.md.
`--push org/name` puts it on the Hugging Face hub, too.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from twell_jax.inference import arguments
from twell_jax.models.pretrained import card, from_pretrained, hub, push, save_pretrained
from twell_jax.models.pretrained import tokenizer as pretrained_tokenizer
from twell_jax.train import compilation_cache, interrupt, utf8
from twell_jax.train.checkpoint_errors import CheckpointError
from twell_jax.train.exported import export_run


def export(
    model: str, directory: Path, *, name: str | None, dtype: str | None, max_shard_bytes: int
) -> None:
    """Writes the model of a run, or one in Hugging Face's format, anew.

    Args:
      model: the `run_dir` of a run, a directory with a config.json, or a name on the hub.
      directory: where to write; new or empty.
      name: of what is written, on the hub; None if it has none.
      dtype, max_shard_bytes: as in `save_pretrained`.

    Raises:
      ConfigError, CheckpointError, PretrainedError: see `export_run` and `from_pretrained`.
    """
    source = hub.find(model)
    if not (source.directory / "config.json").exists():
        export_run(model, directory, name=name, dtype=dtype, max_shard_bytes=max_shard_bytes)
        return
    tokenizer = pretrained_tokenizer.load(source.directory)  # before the large files
    save_pretrained(
        directory,
        from_pretrained(source, param_dtype=dtype),
        tokenizer,
        dtype=dtype,
        max_shard_bytes=max_shard_bytes,
        source=source,
    )
    card.write(directory, name, card.origin(source))


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = arguments.command_line(__doc__)
    parser.add_argument("model", metavar="run", help=arguments.DIRECTORY)
    parser.add_argument("directory", type=arguments.path, help="where to write; new or empty")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of the weights (default: as trained)"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="size of a file, in 1e9 B (default: %(default)s)",
    )
    parser.add_argument(
        "--push",
        metavar="ORG/NAME",
        help="then upload it under this name to the Hugging Face hub (default: no upload)",
    )
    parser.add_argument(
        "--private",
        action="store_true",
        help="what --push creates there is private (default: as the owner has set it there)",
    )
    args = parser.parse_args(argv)
    if not 0 < args.max_shard_gb < float("inf"):
        parser.error(f"--max-shard-gb: must be a positive number, got {args.max_shard_gb}")
    if args.private and args.push is None:
        parser.error("--private: needs --push ORG/NAME")
    try:
        with interrupt.at_once():
            compilation_cache.enable()
            if args.push is not None:
                push.require_possible(args.push)
            export(
                args.model,
                args.directory,
                name=args.push,
                dtype=args.dtype,
                max_shard_bytes=int(min(args.max_shard_gb * 1e9, sys.maxsize)),
            )
            print(f"model: {args.directory}")
            if args.push is not None:
                page = push.push(args.directory, args.push, private=args.private)
                print(f"pushed: {page}")
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

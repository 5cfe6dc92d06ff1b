"""Writes a run in Hugging Face's format: python -m twell_jax.export RUN_DIR DIRECTORY

transformers loads it as a Llama, or as what the run is otherwise: see docs/huggingface.md.
"""

import argparse
import sys
from collections.abc import Sequence

from twell_jax.models.pretrained import save_pretrained
from twell_jax.train import interrupt, utf8
from twell_jax.train.checkpoint import CheckpointError
from twell_jax.train.run_directory import load_run


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", help="directory of a run, such as runs/tiny")
    parser.add_argument("directory", help="where to write; new or empty")
    parser.add_argument(
        "--dtype", choices=("bfloat16", "float32"), help="of the weights (default: as trained)"
    )
    parser.add_argument(
        "--max-shard-gb",
        type=float,
        default=5.0,
        help="size of a file, in 1e9 B (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    if not 0 < args.max_shard_gb < float("inf"):
        parser.error(f"--max-shard-gb: must be a positive number, got {args.max_shard_gb}")
    try:
        with interrupt.at_once():
            _, tokenizer, model = load_run(args.run_dir)
            save_pretrained(
                args.directory,
                model,
                tokenizer,
                dtype=args.dtype,
                max_shard_bytes=int(args.max_shard_gb * 1e9),
            )
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"model: {args.directory}")


if __name__ == "__main__":
    main()

"""Writes a model with 8-bit weights: python -m twell_jax.quantise DIRECTORY OUT

Gates and up projections of the feed-forward blocks become float8_e4m3fn with a scale for each row,
by the convention of compressed-tensors. `--quantise fp8-all-but-down` adds the projections of
attention and the head. Everything else stays as it is.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from twell_jax.inference import arguments
from twell_jax.models.pretrained import PretrainedError, card, hub, quantisation
from twell_jax.models.pretrained import config as pretrained_config
from twell_jax.models.quantised import COVERED, Part
from twell_jax.train import compilation_cache, interrupt, utf8
from twell_jax.train.checkpoint_errors import CheckpointError
from twell_jax.train.exported import export_run
from twell_jax.train.run_directory import RunPaths


def quantise(name: str, directory: Path, parts: Sequence[Part]) -> None:
    """Writes the model of a run, or one in Hugging Face's format, with 8-bit weights.

    Args:
      name: the `run_dir` of a run, a directory with a config.json, or a name on the hub.
      directory: where to write; new or empty.
      parts: the parts to quantise, as in `Transformer.quantise`.

    Raises:
      PretrainedError: there is no such model, it is not supported or quantised already, or the
        directory is not empty.
      CheckpointError: no checkpoint of the run is whole.
      ValueError: a weight holds an inf or a NaN.
    """
    source = hub.find(name)
    if (source.directory / "config.json").exists():
        config, _ = pretrained_config.read(source.directory, None, None)
        hub.fetch_weights(source)
        quantisation.quantise_files(source.directory, directory, parts, config.tie_embeddings)
        card.write(directory, None, card.origin(source))
        return
    if not RunPaths(source.directory).config.exists():
        raise PretrainedError(f"{name}: is not the directory of a run and holds no config.json")
    export_run(name, directory, parts=parts)


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = arguments.command_line(__doc__)
    parser.add_argument("directory", help=arguments.DIRECTORY)
    parser.add_argument("out", type=arguments.path, help="where to write; new or empty")
    parser.add_argument(
        "--quantise",
        choices=COVERED,
        default="fp8",
        help="what becomes 8-bit floats (default: %(default)s)",
    )
    args = parser.parse_args(argv)
    try:
        with interrupt.at_once():
            compilation_cache.enable()
            quantise(args.directory, args.out, COVERED[args.quantise])
    except (CheckpointError, ValueError, OSError) as error:
        sys.exit(f"error: {error}")
    print(f"model: {args.out}")


if __name__ == "__main__":
    main()

"""Draws the plots of training runs: python -m twell_jax.plot RUN_DIR [RUN_DIR ...]

Of one run, it writes training.png and layers.png into RUN_DIR; the run draws them itself at every
evaluation. Of several, it draws loss, non-zeros and speed in one figure, runs.png in the current
directory, or --out. Runs may be going on.
"""

import sys
from collections.abc import Sequence
from pathlib import Path

from twell_jax.config import ConfigError
from twell_jax.inference import arguments
from twell_jax.train import utf8
from twell_jax.train.plots import plot_run
from twell_jax.train.plots_of_runs import plot_runs
from twell_jax.train.run_directory import RunPaths, load_config


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = arguments.command_line(__doc__)
    parser.add_argument("run_dir", nargs="+", help="directory of a run, such as runs/tiny")
    parser.add_argument(
        "--out", type=arguments.path, help="of the figure of several runs (default: runs.png)"
    )
    args = parser.parse_args(argv)
    one, *others = args.run_dir
    if args.out and not others:
        parser.error("--out: is for the figure of several runs; those of one go into its directory")
    arguments.check_out(parser, args.out)
    try:
        if others:
            paths = [args.out or Path("runs.png")]
            plot_runs(args.run_dir, *paths)
        else:
            paths = plot_run(load_config(one), RunPaths(one))
        for path in paths:
            print(f"plot: {path}")
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

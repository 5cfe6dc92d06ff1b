"""Draws the plots of a training run: python -m twell_jax.plot RUN_DIR

Writes training.png and layers.png into RUN_DIR. The run may be going on; it draws them itself at
every evaluation.
"""

import argparse
import sys
from collections.abc import Sequence

from twell_jax.config import ConfigError
from twell_jax.train import utf8
from twell_jax.train.plots import plot_run
from twell_jax.train.run_directory import RunPaths, load_config


def main(argv: Sequence[str] | None = None) -> None:
    """Runs the command; `argv` is without the program's name, None takes `sys.argv`."""
    if argv is None:
        utf8.ensure()
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("run_dir", help="directory of a run, such as runs/tiny")
    args = parser.parse_args(argv)
    try:
        for path in plot_run(load_config(args.run_dir), RunPaths(args.run_dir)):
            print(f"plot: {path}")
    except (ConfigError, OSError) as error:
        sys.exit(f"error: {error}")


if __name__ == "__main__":
    main()

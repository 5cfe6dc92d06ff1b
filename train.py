"""Trains a sparse language model: python train.py configs/tiny.yaml [key=value ...]

`twell_jax/train/command.py` defines the command, `twell_jax/train/loop.py` the training. Once the
package is installed, `python -m twell_jax.train` is the same command.
"""

from twell_jax.train.command import main

if __name__ == "__main__":
    main()

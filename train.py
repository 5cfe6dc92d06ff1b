"""Trains a sparse language model: python train.py configs/tiny.yaml [key=value ...]

`twell_jax/train/command.py` defines the command, `twell_jax/train/loop.py` the training. Once the
package is installed, `python -m twell_jax.train` is the same command.
"""

import signal

# While the modules load, Ctrl-C ends the process without a traceback.
if __name__ == "__main__" and signal.getsignal(signal.SIGINT) is signal.default_int_handler:
    signal.signal(signal.SIGINT, signal.SIG_DFL)

from twell_jax.train.command import main

if __name__ == "__main__":
    main()

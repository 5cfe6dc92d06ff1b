"""python -m twell_jax.train CONFIG [key=value ...]: the same command as train.py."""

from twell_jax.train.command import main

if __name__ == "__main__":
    main(prog="python -m twell_jax.train")

"""Where the package keeps what it found out on this machine."""

import os
from pathlib import Path


def directory() -> Path:
    """The directory TWELL_JAX_CACHE, or else `twell-jax` in the user's cache directory.

    Raises:
      FileNotFoundError: neither is named, and the user has no home directory.
    """
    if named := os.environ.get("TWELL_JAX_CACHE"):
        return Path(named)
    if cache := os.environ.get("XDG_CACHE_HOME"):
        return Path(cache) / "twell-jax"
    try:
        return Path.home() / ".cache" / "twell-jax"
    except RuntimeError as error:
        raise FileNotFoundError(f"{error}; TWELL_JAX_CACHE names a directory") from None

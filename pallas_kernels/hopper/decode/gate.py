"""The gate of a feed-forward block of few tokens, as one kernel hands it to the next."""

from typing import NamedTuple

import jax


class Gate(NamedTuple):
    """The gate of a sparse feed-forward block, and what its kernel has computed of the rest.

    Attributes:
      values: `[M, H]`, not negative.
      hidden: `[M, H]`, the hidden activation of tiles whose thread blocks have agreed on it by
        their votes (`active_counts`), and of those that are not live; what others hold
        is undefined. None without a gate projection.
      l1: float32 `[M, H / 16]`, in parts, the sum of its magnitudes, likewise.
      counts: of one layer, as in `active_counts`, if the kernel was given none.
    """

    values: jax.Array
    hidden: jax.Array | None = None
    l1: jax.Array | None = None
    counts: jax.Array | None = None

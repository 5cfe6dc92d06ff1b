"""The list of heavy rows: tokens that a packed format does not hold.

Kernels append to such a list; `dense_rows` computes what is on it. Only the device knows its
length.
"""

from dataclasses import dataclass

import jax

from pallas_kernels.quantised import Tokens


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeavyRows:
    """The rows of x that a kernel leaves to `dense_rows`, in any order.

    Attributes:
      count: int32 `[1]`, the length of the list, from 0 to M.
      rows: int32 `[M]` or longer, distinct row indices; unspecified from `count` on.
      x: `[M rounded up to a multiple of 8, D]`, these rows of x, or the `Tokens` of these rows;
        unspecified from `count` on.
      pending: what the kernel before `dense_rows` may still read or write when that starts, if it
        lets it start before it ends, but not before the list is complete. `dense_rows` takes these
        arrays so that XLA does not use their memory for something else.
    """

    count: jax.Array
    rows: jax.Array
    x: jax.Array | Tokens
    pending: tuple[jax.Array, ...] = ()

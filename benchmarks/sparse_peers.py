"""The sparse block by other people's formats, through XLA: peers of the kernels in benchmarks.ffn.

Both compute the gate densely and convert it in a pass of its own, which our kernels' epilogues do
without one:

    ellpack   each token's neurons and gates side by side, `[M, width]`, as wide as the token that
              has most neurons active; a loop over the width gathers a row of each weight per token
    bcoo      `jax.experimental.sparse.BCOO`: a list of all non-zeros, a sampled product for the up
              projection, a sparse one for the down projection

XLA needs sizes of both when it compiles, so they are counted before.
"""

import math
from collections.abc import Callable
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import sparse

from twell_jax import sparse_ffn
from twell_jax.analysis import timing

MAX_WIDTH = 1024  # a wider ELLPACK takes longer than the dense block, by far
MAX_BYTES = 16 << 30  # of the rows that BCOO's products gather, one for each non-zero


class Capacity(NamedTuple):
    """The sizes of the packed gates of a case.

    Attributes:
      width: columns of ELLPACK, a few more than the non-zeros of any token.
      entries: of BCOO, a few more than the non-zeros of all tokens.
    """

    width: int
    entries: int


def measure(
    x: jax.Array, layers: list, calls: int, *, name: str
) -> tuple[jax.Array, dict[str, float]]:
    """Times the block with each layer's weights in turn.

    Args:
      x: `[M, D]`.
      layers: triples of (w_gate or None, w_up, w_down), sparse alike.
      calls: how many calls are queued at a time.
      name: a key of `FORMATS`.

    Returns:
      y of the first layer; "ms" per layer.

    Raises:
      ValueError: the format would be too large.
    """
    run = runner(name, x, layers[0])
    ms = timing.milliseconds(run, x, layers, calls=calls)
    return run(x, layers[:1])[0], {"ms": ms / len(layers)}


def runner(name: str, x: jax.Array, layer) -> Callable:
    """`run(x, layers)` by the peer of this name: y for each layer.

    Args:
      name: a key of `FORMATS`.
      x: `[M, D]`.
      layer: (w_gate or None, w_up, w_down) of one of the layers, which are sparse alike.

    Raises:
      ValueError: the format would be too large.
    """
    _, stats = jax.jit(partial(sparse_ffn, implementation="xla"))(x, *layer)
    # The sums of another layer may fall on the other side of zero.
    width = 8 * math.ceil(1.02 * (int(stats.max_nnz) + 4) / 8)
    entries = math.ceil(1.02 * len(x) * (float(stats.nnz) + 1))
    capacity = Capacity(min(width, len(layer[-1])), entries)
    if name == "ellpack" and capacity.width > MAX_WIDTH:
        raise ValueError(f"ellpack would be {capacity.width} wide, more than {MAX_WIDTH}")
    if name == "bcoo" and (size := capacity.entries * x.shape[1] * x.dtype.itemsize) > MAX_BYTES:
        raise ValueError(f"bcoo would gather {size} bytes, more than {MAX_BYTES}")
    return partial(stack, name=name, capacity=capacity)


@partial(jax.jit, static_argnames=("name", "capacity"))
def stack(x: jax.Array, layers: list, *, name: str, capacity: Capacity) -> list[jax.Array]:
    """The block with each layer's weights in turn, all on one x; NaN where it does not fit."""
    return [FORMATS[name](x, *weights, capacity) for weights in layers]


def ellpack(x, w_gate, w_up, w_down, capacity: Capacity) -> jax.Array:
    """The block by ELLPACK, float32 sums."""
    gate = _dense_gate(x, w_up if w_gate is None else w_gate)
    # No gate is negative, so that the largest are all that are not zero, and some zeros.
    values, neurons = lax.optimization_barrier(lax.top_k(gate, capacity.width))
    fits = jnp.all(jnp.sum(gate != 0, axis=1) <= capacity.width)

    def add(i, y):
        h, n = values[:, i].astype(jnp.float32), neurons[:, i]
        if w_gate is not None:
            h *= jnp.sum(x.astype(jnp.float32) * w_up[n], axis=1)
        return y + h[:, None] * w_down[n]

    y = lax.fori_loop(0, capacity.width, add, jnp.zeros(x.shape, jnp.float32))
    return jnp.where(fits, y, jnp.nan).astype(x.dtype)


def bcoo(x, w_gate, w_up, w_down, capacity: Capacity) -> jax.Array:
    """The block by BCOO."""
    gate = _dense_gate(x, w_up if w_gate is None else w_gate)
    packed = sparse.BCOO.fromdense(gate, nse=capacity.entries)
    data, indices = lax.optimization_barrier((packed.data, packed.indices))
    fits = jnp.sum(gate != 0) <= capacity.entries
    if w_gate is not None:
        contracted = (((1,), (1,)), ((), ()))
        data *= sparse.bcoo_dot_general_sampled(x, w_up, indices, dimension_numbers=contracted)
    h = sparse.BCOO((data, indices), shape=gate.shape, indices_sorted=True, unique_indices=True)
    y = sparse.bcoo_dot_general(
        h, w_down, dimension_numbers=(((1,), (0,)), ((), ())), preferred_element_type=jnp.float32
    )
    return jnp.where(fits, y, jnp.nan).astype(x.dtype)


def _dense_gate(x, w):
    return lax.optimization_barrier(jnp.maximum(x @ w.T, 0))


FORMATS = {"ellpack": ellpack, "bcoo": bcoo}

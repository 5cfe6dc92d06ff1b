"""Lists of open rows, in shared memory: those of neurons that are active for some token.

Two warpgroups make a list from masks, of a bit for each of 16 rows, and take turns at its rows. If
more rows are open than the list holds, they look at all rows' masks instead.

Functions take shared memory by name: int32 `masks`, a word for each group of rows, `listed`, the
list, and `counts`, of a word for each warp.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.hopper.decode.one_launch import lane, memory
from pallas_kernels.hopper.decode.one_launch.lane import LANES
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS


def groups(rows: int, groups, thread: jax.Array) -> list[jax.Array]:
    """The groups of which each lane is to bring the masks, -1 past the first `groups`; `thread` is
    a lane's number of 256."""
    starts = range(0, rows // ROWS, 2 * LANES)
    return [jnp.where(thread + start < groups, thread + start, -1) for start in starts]


def fill(
    smem,
    meet: Callable[[], None],
    thread: jax.Array,
    places: list[jax.Array],
    masks: list[jax.Array],
) -> jax.Array:
    """Lists the rows of masks; returns how many there are, int32 scalar.

    Args:
      smem: shared memory.
      meet: lets the warpgroups wait for each other.
      thread: a lane's number of 256.
      places, masks: `groups`, and their masks.
    """
    own = lane.full(0)
    for place, mask in zip(places, masks, strict=True):
        memory.scatter(smem["masks"], place, mask)
        own += lane.popcount(mask)
    up_to = lane.sum_up_to(own)
    warp = thread >> 5
    counts = smem["counts"]
    memory.scatter(counts, jnp.where(thread & 31 == 31, warp, -1), up_to)
    meet()
    at = up_to - own
    for i in range(BLOCK_WARPS):
        at += jnp.where(i < warp, memory.gather(counts, lane.full(i)), 0)
    for place, mask in zip(places, masks, strict=True):

        def list_bits(i, at, place=place, mask=mask):
            lane.keep_loop()
            for bit in range(4):
                is_open = (mask >> (4 * i + bit)) & 1
                is_listed = (is_open != 0) & (at < len(smem["listed"]))
                row = place * ROWS + 4 * i + bit
                memory.scatter(smem["listed"], jnp.where(is_listed, at, -1), row)
                at += is_open
            return at

        at = lax.fori_loop(0, ROWS // 4, list_bits, at)
    meet()
    return sum((memory.number_at(counts, i) for i in range(BLOCK_WARPS)), start=jnp.int32(0))


def to_look_at(smem, found: jax.Array, groups) -> jax.Array:
    """How many numbers `row_at` has: those of rows that are listed, or of all."""
    return jnp.where(found <= len(smem["listed"]), found, groups * ROWS)


def row_at(smem, number: jax.Array, found: jax.Array, groups) -> jax.Array:
    """The row of each lane's number, of `to_look_at`; -1 where it has none, or it is not open."""
    is_listed = found <= (most := len(smem["listed"]))
    listed = memory.gather(smem["listed"], jnp.minimum(number, most - 1))
    mask = memory.gather(smem["masks"], jnp.where(number < groups * ROWS, number >> 4, -1))
    is_open = jnp.where(is_listed, number < found, ((mask >> (number & 15)) & 1) != 0)
    return jnp.where(is_open, jnp.where(is_listed, listed, number), -1)

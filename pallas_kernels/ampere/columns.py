"""The product of few hidden activations with the rows of w_down that are open.

A thread block has 16 columns. It finds the open rows by their masks, and its lanes bring a row's
columns and activations each: 256 rows at once, while those before are multiplied.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.common import params
from pallas_kernels.hopper.decode.one_launch import lane, memory, open_lists, products
from pallas_kernels.hopper.decode.one_launch.block import meet
from pallas_kernels.hopper.decode.one_launch.lane import LANES, WARPS
from pallas_kernels.hopper.decode.one_launch.plan import ROWS
from pallas_kernels.hopper.decode.one_launch.products import BLOCK_WARPS, TOKENS

_THREADS = 2 * LANES
_WORDS = ROWS // 2  # of a row's columns
_LISTED = 1024  # open rows that are listed


def down(hidden: jax.Array, masks: jax.Array, w: jax.Array, m: int) -> jax.Array:
    """`hidden^T @ w` of the open rows, `[m, D]`.

    Args:
      hidden: `[H, M]`, M a multiple of 8 up to 64.
      masks: from `rows.gate`.
      w: `[H, D]`.
      m: tokens.
    """
    (h, columns), d = hidden.shape, w.shape[1]
    tiles = columns // TOKENS
    # Lanes then read different banks.
    words = 4 * (tiles | 1)
    kernel = plgpu.kernel(
        functools.partial(_down, tiles=tiles),
        out_type=jax.ShapeDtypeStruct((m, d), w.dtype),
        scratch_types=dict(
            smem=dict(
                masks=plgpu.SMEM((h // ROWS,), jnp.int32),
                listed=plgpu.SMEM((min(h, _LISTED),), jnp.int32),
                counts=plgpu.SMEM((BLOCK_WARPS,), jnp.int32),
                columns=plgpu.SMEM((_THREADS, _WORDS), jnp.int32),
                hidden=plgpu.SMEM((_THREADS, words), jnp.int32),
                parts=plgpu.SMEM((tiles, BLOCK_WARPS, ROWS * TOKENS), jnp.float32),
            ),
            together=plgpu.Barrier(num_arrivals=2),
        ),
        grid=(d // ROWS,),
        grid_names=("block",),
        num_threads=2,
        thread_name="wg",
        kernel_name="few_down",
        compiler_params=params.UNORDERED,
    )
    return kernel(hidden, masks, w)


def _down(hidden, masks, w, y, *, smem, together, tiles):
    wg, block = lax.axis_index("wg"), lax.axis_index("block")
    thread = lane.numbers() + LANES * wg
    found = _list(masks, smem, thread, together)
    sums = _sum_of_rows(hidden, w, smem, thread, found, together, tiles)
    products.put(smem["parts"], jnp.int32(0), sums, wg)
    meet(together)
    own, pair = thread >> 3, thread & (_WORDS - 1)
    for start in range(0, TOKENS * tiles, _THREADS // _WORDS):
        token = own + start
        is_there = token < len(y)
        token = jnp.where(is_there, token, 0)
        halves = [
            products.sum_of_warps(smem["parts"], jnp.int32(0), tiles, 2 * pair + i, token)
            for i in range(2)
        ]
        place = token * (y.shape[1] // 2) + block * _WORDS + pair
        memory.store(y, jnp.where(is_there, place, -1), lane.pack(*halves, y.dtype))


def _list(masks, smem, thread, together):
    """Lists the open rows; returns how many there are."""
    groups = len(masks)
    places = open_lists.groups(groups * ROWS, groups, thread)
    found = []
    for place in places:
        of_warps = memory.load(masks, jnp.where(place < 0, -1, place * WARPS), WARPS)
        found.append(functools.reduce(jnp.bitwise_or, of_warps))
    return open_lists.fill(smem, lambda: meet(together), thread, places, found)


def _sum_of_rows(hidden, w, smem, thread, found, together, tiles):
    """Sums of each warp, of 16 columns of the open rows times their activations."""
    groups, words = len(hidden) // ROWS, hidden.shape[1] // 2
    pitch = smem["hidden"].shape[1]
    ahead = min(tiles, 2)  # steps whose rows are on their way: few tokens open few rows
    steps = pl.cdiv(open_lists.to_look_at(smem, found, groups), _THREADS)

    def request(i):
        """A lane's columns of its row in a step, and that row's activations; or zeros."""
        row = open_lists.row_at(smem, i * _THREADS + thread, found, groups)

        def load(ref, of_row, first, count):
            found = []
            for start in range(0, count, 4):
                place = jnp.where(row >= 0, row * of_row + first + start, -1)
                found += memory.load(ref, place, 4)
            return found

        of_columns = load(w, w.shape[1] // 2, lax.axis_index("block") * _WORDS, _WORDS)
        return tuple(of_columns + load(hidden, words, 0, words))

    def step(i, carry):
        sums, row, *others = carry
        row = [*row]
        following = request(i + ahead)
        for start in range(0, _WORDS, 4):
            place = thread * _WORDS + start
            memory.scatter_four(smem["columns"], place, row[start : start + 4])
        for start in range(0, words, 4):
            some = row[_WORDS + start :][:4]
            memory.scatter_four(smem["hidden"], thread * pitch + start, some)
        meet(together)
        sums = products.add_rows(
            smem["columns"], smem["hidden"], [*sums], lax.axis_index("wg"), dtype=w.dtype
        )
        meet(together)
        return tuple(sums), *others, following

    start = tuple(products.zeros(tiles)), *(request(jnp.int32(i)) for i in range(ahead))
    return [*lax.fori_loop(0, steps, step, start)[0]]

"""Attention of one new token of a sequence to a stage of its stored keys and values.

Each of the eight warps of a block takes 16 of a part's keys and 64 features of the values, and
keeps the running softmax of these keys; `heads` adds up what the warps have. A stage is a part, or
two in 8 bits. Up to eight query heads that share a key/value head are the rows of the products
(`mma.sync`), whose lower eight rows stay empty. A head has a multiple of 16 features, up to 256. In
shared memory it takes 64, 128 or 256 (`room_of`), of which the last may be zeros.

Numbers of 8 bits become bfloat16 in registers. The scales of keys and values come to scores and
probabilities.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import tiled
from pallas_kernels.hopper.decode.one_launch import key_products, lane, memory
from pallas_kernels.hopper.decode.one_launch.key_products import (
    BLOCK,
    constant,
    room_of,
    tile_columns,
)
from pallas_kernels.hopper.decode.one_launch.lane import WORD, ptx
from pallas_kernels.hopper.decode.one_launch.products import LOG2_E

MOST_HEADS = 8  # that are multiplied together
_PART = 8192  # numbers of keys that are multiplied at a time
_STAGE = 2 * _PART  # bytes
_KEYS = 16  # that it has
LEAST = -1e30  # of a score


class State(NamedTuple):
    """What a warp knows: of each of eight heads the lanes 4 h ... 4 h + 3 have a quarter.

    Attributes:
      top: the largest score so far.
      total: the sum of the exponentials over a lane's keys.
      values: 16 float32 of a lane, the weighted sum of the values.
    """

    top: jax.Array
    total: jax.Array
    values: list[jax.Array]

    @classmethod
    def empty(cls) -> "State":
        """Before the first key."""
        zero = lane.full(0.0, jnp.float32)
        return cls(lane.full(LEAST, jnp.float32), zero, 16 * [zero])


def keys_of_stage(size: int, itemsize: int) -> int:
    """How many keys of so many features, of so many bytes each, a stage has."""
    return _STAGE // (room_of(size) * itemsize)


def key_tiles(size: int) -> int:
    """How many warps share a part's keys; of eight, others have further features of the values."""
    return _PART // (room_of(size) * _KEYS)


def transforms(size: int, dtype: jax.typing.DTypeLike) -> tuple:
    """Of a stage of keys or values in SMEM."""
    return tiled(dtype, tile_columns(size, jnp.dtype(dtype).itemsize))


def feature_of(i: int, quad: jax.Array, itemsize: int) -> jax.Array:
    """Of 64 features, the one of a lane's i-th of `State.values`."""
    if itemsize == 2:
        return 8 * (i // 2) + 2 * quad + i % 2
    return 16 * (i // 4) + 4 * quad + i % 4


def queries(q_smem, size: int, itemsize: int) -> list[jax.Array]:
    """What `attend` takes of the queries; `q_smem`: int32 `[heads, size / 2 + 4]`.

    A lane has the words whose features it gets of keys by `ldmatrix`: those of 4 bytes.
    """
    number = lane.numbers()
    head, quad = (number >> 2) & 7, number & 3
    first = jnp.minimum(head, q_smem.shape[0] - 1) * q_smem.shape[1]
    if itemsize == 2:
        return [memory.gather(q_smem, first + quad + 4 * i) for i in range(size // 8)]
    return [
        memory.gather(q_smem, first + 2 * quad + 8 * (i // 2) + i % 2) for i in range(size // 8)
    ]


def scales_of(scale_ref, start: jax.Array, size: int, wg: jax.Array) -> list[jax.Array]:
    """The scales of a lane's keys of a stage in 8 bits: of each part four.

    Args:
      scale_ref: GMEM, float32 `[capacity]`.
      start: int32 scalar, the stage's first key, which may be past the end.
      size: of a head.
      wg: int32 scalar, the warpgroup.
    """
    tiles, number = key_tiles(size), lane.numbers()
    warp = (number >> 5) + 4 * wg
    first = start + (warp & (tiles - 1)) * _KEYS + 2 * (number & 3)
    places = [first + part * tiles * _KEYS + more for part in (0, 1) for more in (0, 8)]
    places = [jnp.where(place < scale_ref.shape[0], place, -1) for place in places]
    words = [word for place in places for word in memory.load(scale_ref, place, 2)]
    return [lax.bitcast_convert_type(word, jnp.float32) for word in words]


@primitive
def attend(
    k_ref,
    v_ref,
    q: list[jax.Array],
    state: State,
    start: jax.Array,
    left: jax.Array,
    wg: jax.Array,
    scales: list[jax.Array],
    *,
    size: int,
) -> State:
    """The state after a stage.

    Args:
      k_ref, v_ref: SMEM, bfloat16 or 8-bit floats `[keys, room_of(size)]`, with `transforms`.
      q: of `queries`.
      state: before.
      start, left: int32 scalars, the stage's first key that is attended to, and the one behind the
        last; others may hold anything.
      wg: int32 scalar, the warpgroup.
      scales: of keys, and then of values, as `scales_of` gives them; none for bfloat16.
      size: of a head.
    """
    f32, dtype = lane.struct(jnp.float32), k_ref.dtype
    types = (WORD, WORD, 16 * [WORD])

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(transforms(size, dtype)),
            plgpu.RefType(transforms(size, dtype)),
            len(q) * [WORD],
            *types,
            SCALAR,
            SCALAR,
            SCALAR,
            len(scales) * [WORD],
        ),
        return_type=(f32, f32, 16 * [f32]),
    )
    def step(_, k, v, q, top, total, values, start, left, wg, scales):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        start, left = lane.scalar(start), lane.scalar(left)
        q, scales = _words(q), _words(scales)
        state = lane.word(top), lane.word(total), _words(values)
        parts = _STAGE // (_PART * dtype.itemsize)
        for part in range(parts):
            of_part = [scales[i + 4 * part :][:4] for i in (0, len(scales) // 2)]
            first = part * key_tiles(size) * _KEYS
            state = _of_part(k, v, q, state, start, left, number, warp, of_part, first, size)
        top, total, values = state
        return lane.array(top), lane.array(total), [lane.array(one) for one in values]

    return State(*step(k_ref, v_ref, q, *state, start, left, wg, scales))


def _words(arrays):
    return [lane.word(one) for one in arrays]


def _of_part(k, v, q, state, start, left, number, warp, scales, first_of_all, size):
    """The state after a part of a stage, whose keys `first_of_all` and those behind it are."""
    top, total, values = state
    tiles = key_tiles(size)
    first = arith.muli(arith.andi(warp, const(tiles - 1)), const(_KEYS))
    first = arith.addi(first, const(first_of_all))
    block = arith.divui(warp, const(tiles))
    # Of this warp's; they may be less than none.
    start, left = (arith.subi(one, first) for one in (start, left))
    quad = arith.andi(number, const(3))
    keys = [arith.addi(arith.muli(quad, const(2)), const(i)) for i in (0, 1, 8, 9)]
    is_key = [
        arith.andi(
            arith.cmpi(arith.CmpIPredicate.slt, key, left),
            arith.cmpi(arith.CmpIPredicate.sge, key, start),
        )
        for key in keys
    ]
    of_keys, of_values = scales
    products = key_products.IN_8_BITS if of_keys else key_products.IN_16_BITS
    scores = products.scores(k, q, first, number, size)
    if of_keys:
        scores = [arith.mulf(*pair) for pair in zip(scores, of_keys, strict=True)]
    p, new, shrink = _softmax(scores, is_key, top, size)
    total = arith.mulf(total, shrink)
    for one in p:
        total = arith.addf(total, one)
    values = [arith.mulf(one, shrink) for one in values]
    if of_values:  # which may be anything where there is no key
        zero = constant(0.0)
        p = [
            arith.select(is_it, arith.mulf(one, scale), zero)
            for is_it, one, scale in zip(is_key, p, of_values, strict=True)
        ]
    return new, total, products.add_values(v, p, values, is_key, first, block, number, size)


def _softmax(scores, is_key, top, size):
    """Exponentials of a lane's scores, with what is the largest now, and what to multiply earlier
    sums with, as another was the largest when they were added up."""
    least = constant(LEAST * LOG2_E / size**0.5)
    scores = [arith.mulf(s, constant(LOG2_E / size**0.5)) for s in scores]
    scores = [arith.select(is_it, s, least) for is_it, s in zip(is_key, scores, strict=True)]
    new = top
    for score in scores:
        new = arith.maximumf(new, score)
    for distance in (1, 2):
        new = arith.maximumf(new, _shuffled(new, distance))
    p, zero = [_exp2(arith.subf(score, new)) for score in scores], constant(0.0)
    p = [arith.select(is_it, one, zero) for is_it, one in zip(is_key, p, strict=True)]
    return p, new, _exp2(arith.subf(top, new))


@attend.in_jax
def _attend(k_ref, v_ref, q, state, start, left, wg, scales, *, size):
    tiles, itemsize = key_tiles(size), k_ref.dtype.itemsize
    k, v = k_ref[...][:, :size].astype(jnp.float32), v_ref[...].astype(jnp.float32)
    features = _features_of_queries(size, itemsize)
    of_values = jnp.stack([feature_of(i, jnp.arange(4), itemsize) for i in range(16)], 1)
    found = []
    for warp in range(4):
        of_lanes = slice(32 * warp, 32 * warp + 32)
        words = jnp.stack([one[of_lanes].reshape(8, 4) for one in q], 2)  # heads, quads, words
        queries = jnp.stack(lane.unpack(words), -1)
        queries = jnp.zeros((8, size)).at[:, features].set(queries)
        top, total = (one[of_lanes].reshape(8, 4) for one in state[:2])
        values = jnp.stack([one[of_lanes] for one in state.values], 1)
        by = [_of_keys([a[of_lanes][:4] for a in part]) for part in _fours(scales)]
        for part in range(2 // itemsize):
            number = warp + 4 * wg
            first, block = (part * tiles + number % tiles) * _KEYS, number // tiles
            keys = lax.dynamic_slice_in_dim(k, first, _KEYS)
            is_key = (first + jnp.arange(_KEYS) < left) & (first + jnp.arange(_KEYS) >= start)
            scores = queries @ keys.T * (by[part] if by else 1.0)
            scores = jnp.where(is_key, scores * (LOG2_E / size**0.5), LEAST)
            new = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
            shrink = jnp.exp2(top - new)
            p = jnp.where(is_key, jnp.exp2(scores - new[:, :1]), 0)
            of_quad = p.reshape(8, 2, 4, 2).sum(axis=(1, 3))
            mine = lax.dynamic_slice(v, (first, block * BLOCK), (_KEYS, BLOCK))
            mine = jnp.where(is_key[:, None], mine, 0)
            p = jnp.where(is_key, p * by[2 + part], 0) if by else p
            o = p.astype(jnp.bfloat16).astype(jnp.float32) @ mine
            values = values * shrink.reshape(32, 1) + o[:, of_values].reshape(32, 16)
            top, total = new, total * shrink + of_quad
        found.append((top.reshape(32), total.reshape(32), values))
    top, total, values = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
    return State(top, total, [values[:, i] for i in range(16)])


def _features_of_queries(size: int, itemsize: int) -> jax.Array:
    """Which features a lane of a quad has, of each word of `queries` two: `[4, words, 2]`."""
    quad, word = jnp.arange(4)[:, None], jnp.arange(size // 8)
    first = 8 * word + 2 * quad if itemsize == 2 else 16 * (word // 2) + 4 * quad + 2 * (word % 2)
    return first[..., None] + jnp.arange(2)


def _fours(scales):
    return [scales[i : i + 4] for i in range(0, len(scales), 4)]


def _of_keys(of_quad):
    """16 numbers in the order of keys, of which a lane of a quad has four: see `scales_of`."""
    return jnp.stack(of_quad, 1).reshape(4, 2, 2).transpose(1, 0, 2).reshape(16)


def _shuffled(value: ir.Value, distance: int) -> ir.Value:
    return ptx(
        f"shfl.sync.bfly.b32 $0, $1, {distance}, 31, -1;",
        value,
        result_types=value.type,
        convergent=True,
        has_side_effects=True,
    )


def _exp2(value: ir.Value) -> ir.Value:
    return ptx("ex2.approx.ftz.f32 $0, $1;", value, result_types=value.type)

"""Attention of one new token of a sequence to a stage of its stored keys and values.

Each of the eight warps of a block takes 16 of a stage's keys and 64 features of the values, and
keeps the running softmax of these keys; `heads` adds up what the warps have. Up to eight query
heads that share a key/value head are the rows of the products (`mma.sync`), whose lower eight rows
stay empty. A head has a multiple of 16 features, up to 256. In shared memory it takes 64, 128 or
256 (`room_of`), of which the last may be zeros.
"""

import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import tiled
from pallas_kernels.hopper.decode.one_launch import lane, memory
from pallas_kernels.hopper.decode.one_launch.lane import WORD, ptx
from pallas_kernels.hopper.decode.one_launch.products import LOG2_E

MOST_HEADS = 8  # that are multiplied together
_STAGE = 8192  # numbers
_BLOCK = 64  # features of the values that a warp has
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


def room_of(size: int) -> int:
    """The features that a head of `size` features takes of warps and lanes: 64, 128 or 256."""
    return max(_BLOCK, 1 << (size - 1).bit_length())


def keys_of_stage(size: int) -> int:
    """How many keys of so many features a stage has."""
    return _STAGE // room_of(size)


def key_tiles(size: int) -> int:
    """How many warps share a stage's keys; of eight, others have further features of the values."""
    return keys_of_stage(size) // _KEYS


def transforms(size: int) -> tuple:
    """Of a stage of keys or values in SMEM."""
    return tiled(jnp.bfloat16, _tile_columns(size))


def _tile_columns(size: int) -> int:
    return math.gcd(size, _BLOCK)


def queries(q_smem, size: int) -> list[jax.Array]:
    """What `attend` takes of the queries; `q_smem`: int32 `[heads, size / 2 + 4]`."""
    number = lane.numbers()
    head, quad = (number >> 2) & 7, number & 3
    places = jnp.minimum(head, q_smem.shape[0] - 1) * q_smem.shape[1] + quad
    return [memory.gather(q_smem, places + 4 * i) for i in range(size // 8)]


@primitive
def attend(
    k_ref,
    v_ref,
    q: list[jax.Array],
    state: State,
    start: jax.Array,
    left: jax.Array,
    wg: jax.Array,
    *,
    size: int,
) -> State:
    """The state after a stage.

    Args:
      k_ref, v_ref: SMEM, bfloat16 `[keys, room_of(size)]`, with `transforms`.
      q: of `queries`.
      state: before.
      start, left: int32 scalars, the stage's first key that is attended to, and the one behind the
        last; others may hold anything.
      wg: int32 scalar, the warpgroup.
      size: of a head.
    """
    f32 = lane.struct(jnp.float32)
    types = (WORD, WORD, 16 * [WORD])

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.RefType(transforms(size)),
            plgpu.RefType(transforms(size)),
            len(q) * [WORD],
            *types,
            SCALAR,
            SCALAR,
            SCALAR,
        ),
        return_type=(f32, f32, 16 * [f32]),
    )
    def step(_, k, v, q, top, total, values, start, left, wg):
        number, warp = simt.lane_and_warp()
        warp = arith.addi(warp, arith.muli(lane.scalar(wg), const(4)))
        tiles = key_tiles(size)
        first = arith.muli(arith.andi(warp, const(tiles - 1)), const(_KEYS))
        block = arith.divui(warp, const(tiles))
        # Of this warp's; they may be less than none.
        start, left = (arith.subi(lane.scalar(one), first) for one in (start, left))
        q = [lane.word(one) for one in q]
        scores = _scores(k, q, first, number, size)
        quad = arith.andi(number, const(3))
        keys = [arith.addi(arith.muli(quad, const(2)), const(i)) for i in (0, 1, 8, 9)]
        is_key = [
            arith.andi(
                arith.cmpi(arith.CmpIPredicate.slt, key, left),
                arith.cmpi(arith.CmpIPredicate.sge, key, start),
            )
            for key in keys
        ]
        p, new, shrink = _softmax(scores, is_key, lane.word(top), size)
        total = arith.mulf(lane.word(total), shrink)
        for one in p:
            total = arith.addf(total, one)
        values = [arith.mulf(lane.word(one), shrink) for one in values]
        values = _add_values(v, p, values, is_key, first, block, number, size)
        return lane.array(new), lane.array(total), [lane.array(one) for one in values]

    return State(*step(k_ref, v_ref, q, *state, start, left, wg))


def _scores(k, q, first, number, size):
    """Of this lane's head: keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 for its place c in the quad."""
    row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
    totals = [[_constant(0.0)] * 2, [_constant(0.0)] * 2]
    for tile in range(2):  # of eight keys
        key = arith.addi(first, const(8 * tile))
        eighth = arith.shrui(key, const(3))
        for step in range(0, size // 8, 4):
            chunk = arith.addi(part, const(step))  # four chunks of eight features
            words = q[step : step + 4]
            words += (4 - len(words)) * [const(0)]
            totals[tile] = ptx(
                """{.reg .b32 b<4>, zero; .reg .f32 c, d, e, f, none; mov.b32 zero, 0;
                mov.f32 none, 0f00000000;
                ldmatrix.sync.aligned.m8n8.x4.shared.b16 {b0, b1, b2, b3}, [$2];
                mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
                {c, d, e, f}, {$3, zero, $4, zero}, {b0, b1}, {$7, $8, none, none};
                mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
                {c, d, e, f}, {$5, zero, $6, zero}, {b2, b3}, {c, d, none, none};
                mov.f32 $0, c; mov.f32 $1, d;}""",
                _address(k, eighth, row, chunk, size),
                *words,
                *totals[tile],
                result_types=[ir.F32Type.get()] * 2,
                has_side_effects=True,
                convergent=True,
            )
    return [*totals[0], *totals[1]]


def _softmax(scores, is_key, top, size):
    """Exponentials of a lane's scores, with what is the largest now, and what to multiply earlier
    sums with, as another was the largest when they were added up."""
    least = _constant(LEAST * LOG2_E / size**0.5)
    scores = [arith.mulf(s, _constant(LOG2_E / size**0.5)) for s in scores]
    scores = [arith.select(is_it, s, least) for is_it, s in zip(is_key, scores, strict=True)]
    new = top
    for score in scores:
        new = arith.maximumf(new, score)
    for distance in (1, 2):
        new = arith.maximumf(new, _shuffled(new, distance))
    p, zero = [_exp2(arith.subf(score, new)) for score in scores], _constant(0.0)
    p = [arith.select(is_it, one, zero) for is_it, one in zip(is_key, p, strict=True)]
    return p, new, _exp2(arith.subf(top, new))


def _add_values(v, p, values, is_key, first, block, number, size):
    low, high = (_packed(*p[i : i + 2]) for i in (0, 2))
    masks = []
    for i in (0, 2):
        ones = [
            arith.select(is_key[i + j], const(bits), const(0))
            for j, bits in ((0, 0xFFFF), (1, -65536))
        ]
        masks.append(arith.ori(*ones))
    row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
    below, right = arith.andi(part, const(1)), arith.shrui(part, const(1))
    eighth = arith.addi(arith.shrui(first, const(3)), below)
    of_block = arith.addi(arith.muli(block, const(_BLOCK // 8)), right)
    found = []
    for step in range(0, _BLOCK // 8, 2):  # two chunks of eight features
        chunk = arith.addi(of_block, const(step))
        # What no key has may be NaN, which 0 would not take away.
        found += ptx(
            """{.reg .b32 b<4>, zero; .reg .f32 c, d, e, f, none; mov.b32 zero, 0;
            mov.f32 none, 0f00000000;
            ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {b0, b1, b2, b3}, [$4];
            and.b32 b0, b0, $7; and.b32 b1, b1, $8; and.b32 b2, b2, $7; and.b32 b3, b3, $8;
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {c, d, e, f}, {$5, zero, $6, zero}, {b0, b1}, {$9, $10, none, none};
            mov.b32 b0, b2; mov.b32 b1, b3;
            {.reg .f32 g, h;
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
            {g, h, e, f}, {$5, zero, $6, zero}, {b0, b1}, {$11, $12, none, none};
            mov.f32 $2, g; mov.f32 $3, h;}
            mov.f32 $0, c; mov.f32 $1, d;}""",
            _address(v, eighth, row, chunk, size),
            low,
            high,
            *masks,
            *values[2 * step : 2 * step + 4],
            result_types=[ir.F32Type.get()] * 4,
            has_side_effects=True,
            convergent=True,
        )
    return found


def _address(ref, eighth, row, chunk, size) -> ir.Value:
    """Where eight features of a key lie, 16 bytes: those of the chunk, of a row of eight."""
    columns = _tile_columns(size)
    chunks = columns // 8  # of a row of a tile
    tile = arith.addi(
        arith.muli(eighth, const(room_of(size) // columns)), arith.divui(chunk, const(chunks))
    )
    # 128 bytes lie together: a row, or two or four rows of a narrow tile.
    turned = arith.andi(arith.divui(row, const(8 // chunks)), const(chunks - 1))
    place = arith.xori(arith.remui(chunk, const(chunks)), turned)
    offset = arith.addi(arith.muli(tile, const(16 * columns)), arith.muli(row, const(2 * columns)))
    offset = arith.addi(offset, arith.muli(place, const(16)))
    return arith.addi(simt.smem_address(ref), offset)


@attend.in_jax
def _attend(k_ref, v_ref, q, state, start, left, wg, *, size):
    tiles = key_tiles(size)
    k, v = k_ref[...][:, :size].astype(jnp.float32), v_ref[...]
    found = []
    for warp in range(4):
        of_lanes = slice(32 * warp, 32 * warp + 32)
        words = jnp.stack([one[of_lanes].reshape(8, 4) for one in q], 1)  # heads, steps, quads
        queries = jnp.stack(lane.unpack(words), -1).reshape(8, size)
        number = warp + 4 * wg
        first, block = (number % tiles) * _KEYS, number // tiles
        keys = lax.dynamic_slice_in_dim(k, first, _KEYS)
        is_key = (first + jnp.arange(_KEYS) < left) & (first + jnp.arange(_KEYS) >= start)
        scores = jnp.where(is_key, queries @ keys.T * (LOG2_E / size**0.5), LEAST)
        top, total = (one[of_lanes].reshape(8, 4) for one in state[:2])
        new = jnp.maximum(top, jnp.max(scores, axis=1, keepdims=True))
        shrink = jnp.exp2(top - new)
        p = jnp.where(is_key, jnp.exp2(scores - new[:, :1]), 0)
        of_quad = p.reshape(8, 2, 4, 2).sum(axis=(1, 3))
        mine = lax.dynamic_slice(v, (first, block * _BLOCK), (_KEYS, _BLOCK))
        mine = jnp.where(is_key[:, None], mine, 0).astype(jnp.float32)
        o = p.astype(jnp.bfloat16).astype(jnp.float32) @ mine
        o = o.reshape(8, 8, 4, 2).transpose(0, 2, 1, 3).reshape(32, 16)
        before = jnp.stack([one[of_lanes] for one in state.values], 1)
        found.append(
            (
                new.reshape(32),
                (total * shrink + of_quad).reshape(32),
                before * shrink.reshape(32, 1) + o,
            )
        )
    top, total, values = (jnp.concatenate(parts) for parts in zip(*found, strict=True))
    return State(top, total, [values[:, i] for i in range(16)])


def _constant(value: float) -> ir.Value:
    return mgpu.c(value, ir.F32Type.get())


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


def _packed(low: ir.Value, high: ir.Value) -> ir.Value:
    return ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=const(0).type)

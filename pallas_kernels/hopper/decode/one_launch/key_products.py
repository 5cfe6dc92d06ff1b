"""Products of queries with stored keys, and of probabilities with stored values, by `mma.sync`.

A warp takes 16 keys, and 64 features of the values. Those of 8 bits become bfloat16 in registers.
"""

import math
from collections.abc import Callable
from typing import NamedTuple

from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.decode.one_launch.lane import ptx

BLOCK = 64  # features of the values that a warp has


def room_of(size: int) -> int:
    """The features that a head of `size` features takes of warps and lanes: 64, 128 or 256."""
    return max(BLOCK, 1 << (size - 1).bit_length())


def tile_columns(size: int, itemsize: int) -> int:
    return math.gcd(size, 2 * BLOCK // itemsize)


def scores(k, q, first, number, size):
    """Of this lane's head: keys 2 c, 2 c + 1, 2 c + 8, 2 c + 9 for its place c in the quad."""
    row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
    totals = [[constant(0.0)] * 2, [constant(0.0)] * 2]
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


def add_values(v, p, values, is_key, first, block, number, size):
    low, high = (packed(*p[i : i + 2]) for i in (0, 2))
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
    of_block = arith.addi(arith.muli(block, const(BLOCK // 8)), right)
    found = []
    for step in range(0, BLOCK // 8, 2):  # two chunks of eight features
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


def scores_in_8_bits(k, q, first, number, size):
    """`scores` for 8-bit floats: of 16 features a lane has four."""
    row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
    totals = [[constant(0.0)] * 2, [constant(0.0)] * 2]
    for tile in range(2):  # of eight keys
        eighth = arith.shrui(arith.addi(first, const(8 * tile)), const(3))
        for step in range(0, size // 16, 4):
            chunk = arith.addi(part, const(step))  # four chunks of 16 features
            words = q[2 * step : 2 * step + 8]
            words += (8 - len(words)) * [const(0)]
            products = "".join(
                f"""{_widened(f"w{i}", "l", "h", _LOWER, _UPPER)}
                mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32
                {{c, d, e, f}}, {{${3 + 2 * i}, zero, ${4 + 2 * i}, zero}}, {{l, h}},
                {{c, d, none, none}};"""
                for i in range(4)
            )
            totals[tile] = ptx(
                f"""{{{_REGISTERS}
                mov.f32 c, $11; mov.f32 d, $12;
                ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{w0, w1, w2, w3}}, [$2];
                {products} mov.f32 $0, c; mov.f32 $1, d;}}""",
                _address(k, eighth, row, chunk, size, 1),
                *words,
                *totals[tile],
                result_types=[ir.F32Type.get()] * 2,
                has_side_effects=True,
                convergent=True,
            )
    return [*totals[0], *totals[1]]


def add_values_in_8_bits(v, p, values, is_key, first, block, number, size):
    """`add_values` for 8-bit floats, none of which is NaN without its scale."""
    del is_key
    low, high = (packed(*p[i : i + 2]) for i in (0, 2))
    row, part = arith.andi(number, const(7)), arith.shrui(number, const(3))
    below, right = arith.andi(part, const(1)), arith.shrui(part, const(1))
    eighth = arith.addi(arith.shrui(first, const(3)), below)
    of_block = arith.addi(arith.muli(block, const(BLOCK // 16)), right)
    found = []
    for step in range(0, BLOCK // 16, 2):  # two chunks of 16 features
        chunk = arith.addi(of_block, const(step))
        products = "".join(
            # A word has two keys' pairs of features: first those of one, then those of the other.
            f"""{_widened(f"w{2 * i}", "l", "l1", _EVEN, _ODD)}
            {_widened(f"w{2 * i + 1}", "h", "h1", _EVEN, _ODD)}
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{c, d, e, f}},
            {{$9, zero, $10, zero}}, {{l, h}}, {{${11 + 4 * i}, ${13 + 4 * i}, none, none}};
            mov.f32 s{4 * i}, c; mov.f32 s{4 * i + 2}, d;
            mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {{c, d, e, f}},
            {{$9, zero, $10, zero}}, {{l1, h1}}, {{${12 + 4 * i}, ${14 + 4 * i}, none, none}};
            mov.f32 s{4 * i + 1}, c; mov.f32 s{4 * i + 3}, d;"""
            for i in (0, 1)
        )
        results = "".join(f"mov.f32 ${i}, s{i};" for i in range(8))
        found += ptx(
            f"""{{{_REGISTERS} .reg .b32 l1, h1; .reg .f32 s<8>;
            ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {{w0, w1, w2, w3}}, [$8];
            {products} {results}}}""",
            _address(v, eighth, row, chunk, size, 1),
            low,
            high,
            *values[4 * step : 4 * step + 8],
            result_types=[ir.F32Type.get()] * 8,
            has_side_effects=True,
            convergent=True,
        )
    return found


_REGISTERS = """.reg .b32 w<4>, l, h, sign, zero, two_to_120; .reg .f32 c, d, e, f, none;
mov.b32 zero, 0; mov.f32 none, 0f00000000; mov.b32 two_to_120, 0x7B807B80;"""
# Which two bytes of a word are taken, to the upper bytes of both halves.
_LOWER, _UPPER, _EVEN, _ODD = "0x1404", "0x3424", "0x2404", "0x3414"


def _widened(word: str, low: str, high: str, *bytes_of: str) -> str:
    """PTX: four 8-bit floats of a register as bfloat16, two in each of two others.

    Sign, exponent and fraction lie together in both. The exponents differ by 120, of which a
    product takes care, also with numbers below the smallest normal one.
    """
    return "".join(
        f"prmt.b32 {to}, {word}, zero, {which}; and.b32 sign, {to}, 0x80008000; "
        f"and.b32 {to}, {to}, 0x7F007F00; shr.u32 {to}, {to}, 4; or.b32 {to}, {to}, sign; "
        f"mul.rn.bf16x2 {to}, {to}, two_to_120;"
        for to, which in zip((low, high), bytes_of, strict=True)
    )


def _address(ref, eighth, row, chunk, size, itemsize=2) -> ir.Value:
    """Where 16 bytes of a key lie: those of the chunk, of a row of eight."""
    columns = tile_columns(size, itemsize)
    chunks = columns * itemsize // 16  # of a row of a tile
    tile = arith.addi(
        arith.muli(eighth, const(room_of(size) // columns)), arith.divui(chunk, const(chunks))
    )
    # 128 bytes lie together: a row, or two or four rows of a narrow tile.
    turned = arith.andi(arith.divui(row, const(8 // chunks)), const(chunks - 1))
    place = arith.xori(arith.remui(chunk, const(chunks)), turned)
    offset = arith.addi(arith.muli(tile, const(128 * chunks)), arith.muli(row, const(16 * chunks)))
    offset = arith.addi(offset, arith.muli(place, const(16)))
    return arith.addi(simt.smem_address(ref), offset)


def constant(value: float) -> ir.Value:
    return mgpu.c(value, ir.F32Type.get())


def packed(low: ir.Value, high: ir.Value) -> ir.Value:
    return ptx("cvt.rn.bf16x2.f32 $0, $2, $1;", low, high, result_types=const(0).type)


class Products(NamedTuple):
    """The two functions for numbers of some bytes."""

    scores: Callable
    add_values: Callable


IN_16_BITS = Products(scores, add_values)
IN_8_BITS = Products(scores_in_8_bits, add_values_in_8_bits)

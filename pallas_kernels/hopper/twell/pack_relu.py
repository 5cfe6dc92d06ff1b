"""The TwELL epilogue: packs the gate of an accumulator, lane by lane."""

import functools

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import lanes, simt
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.layouts import twell
from pallas_kernels.rectifiers import Rectifier

PACKED_TRANSFORMS = (plgpu.SwizzleTransform(128),)
"""Transforms of the SMEM reference that `pack_relu` fills."""

_ROW_BYTES = 4 * (twell.TILE // twell.COMPRESSION)

# Appends the non-zero halves of the register $2 to a packed row. $1 is the offset in bytes of the
# row's next free word and $0 that offset afterwards; $3 and $4 are the columns of the halves; $5 is
# the row's address, with its swizzle in bits 4..6, so that a word is at (offset & mask) ^ row. The
# mask wraps the offset at the end of the row: entries past the capacity overwrite others.
_APPEND = f"""{{
    .reg .pred nonzero;
    .reg .b32 offset, entry, address;
    mov.b32 offset, $1;

    prmt.b32 entry, $2, $3, 0x1054;
    setp.gt.u32 nonzero, entry, 0xffff;
    lop3.b32 address, offset, {_ROW_BYTES - 4}, $5, 0x6a;
    @nonzero st.shared.b32 [address], entry;
    @nonzero add.u32 offset, offset, 4;

    prmt.b32 entry, $2, $4, 0x3254;
    setp.gt.u32 nonzero, entry, 0xffff;
    lop3.b32 address, offset, {_ROW_BYTES - 4}, $5, 0x6a;
    @nonzero st.shared.b32 [address], entry;
    @nonzero add.u32 offset, offset, 4;

    mov.b32 $0, offset;
}}"""


def pack_relu(
    acc: jax.Array, dtype: jnp.dtype, tile: jax.Array, packed_ref, rectifier: Rectifier
) -> None:
    """Packs 64 rows of one TwELL tile of the gate, rounded to `dtype`, into shared memory.

    Every lane counts its non-zeros in both of its rows, an exclusive scan over the quad turns the
    counts into the lane's first free words, and each value is then stored under its own predicate.
    There are no branches and no atomics, so the time hardly depends on the number of non-zeros.

    Args:
      acc: float32 `[64, 256]` in the WGMMA layout. NaN propagates.
      dtype: bfloat16 or float16.
      tile: int32 scalar, the index of the tile; its first column is `256 * tile`.
      packed_ref: SMEM reference, uint32 `[64, 32]`, with `PACKED_TRANSFORMS`. Words past a row's
        count keep what they held; a row that overflows holds any 31 of its entries.
      rectifier: what makes the gate of `acc`.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            plgpu.Layout.WG_SPLAT(()),
            plgpu.RefType(PACKED_TRANSFORMS),
        )
    )
    def step(_, acc, tile, packed_ref):
        pairs = [
            lanes.gate_pair(rectifier, dtype, *lanes.elements(register))
            for register in acc.registers.flat
        ]
        upper, lower = pairs[0::2], pairs[1::2]
        lane, warp = simt.lane_and_warp()
        quad, quad_lane = arith.divui(lane, const(4)), arith.remui(lane, const(4))

        first, total = _quad_exclusive_sum(_count_nonzero(upper, lower), quad_lane)
        upper_offset, lower_offset = (
            arith.muli(arith.addi(rank, const(1)), const(4)) for rank in _halves(first)
        )

        row = arith.addi(arith.muli(warp, const(16)), quad)
        upper_row = arith.addi(
            simt.smem_address(packed_ref),
            arith.addi(
                arith.muli(row, const(_ROW_BYTES)),
                arith.muli(quad, const(16)),  # the swizzle: quad = row mod 8
            ),
        )
        lower_row = arith.addi(upper_row, const(8 * _ROW_BYTES))

        column = arith.addi(
            arith.muli(tile.registers.item(), const(twell.TILE)), arith.muli(quad_lane, const(2))
        )
        for j, (upper_pair, lower_pair) in enumerate(zip(upper, lower, strict=True)):
            even = arith.addi(column, const(8 * j))
            odd = arith.addi(column, const(8 * j + 1))
            upper_offset = lanes.ptx(_APPEND, upper_offset, upper_pair, even, odd, upper_row)
            lower_offset = lanes.ptx(_APPEND, lower_offset, lower_pair, even, odd, lower_row)

        mgpu.utils.warp_barrier()  # counts go last: an entry that wrapped may be in word 0
        leads = arith.cmpi(arith.CmpIPredicate.eq, quad_lane, const(0))
        for address, count in zip((upper_row, lower_row), _halves(total), strict=True):
            mgpu.utils.inline_ptx("st.shared.b32 [$0], $1;", address, count, predicate=leads)

    step(acc, tile, packed_ref)


def _count_nonzero(upper: list[ir.Value], lower: list[ir.Value]) -> ir.Value:
    """Counts a lane's non-zero values, those of its upper row in the low half of the result, those
    of its lower row in the high half."""
    one = const(0x00010001)
    upper_count, lower_count = (
        functools.reduce(
            arith.addi, [lanes.ptx("min.u16x2 $0, $1, $2;", pair, one) for pair in row]
        )
        for row in (upper, lower)
    )
    even = lanes.ptx("prmt.b32 $0, $1, $2, 0x5410;", upper_count, lower_count)
    odd = lanes.ptx("prmt.b32 $0, $1, $2, 0x7632;", upper_count, lower_count)
    return arith.addi(even, odd)


def _quad_exclusive_sum(x: ir.Value, quad_lane: ir.Value) -> tuple[ir.Value, ir.Value]:
    """Sums of `x` over the quad's lanes before this one, and over all four."""
    zero = const(0)
    neighbour = mgpu.utils.shfl_bfly(x, 1)
    pair = arith.addi(x, neighbour)
    other_pair = mgpu.utils.shfl_bfly(pair, 2)
    is_odd = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(quad_lane, const(1)), zero)
    in_second_pair = arith.cmpi(arith.CmpIPredicate.uge, quad_lane, const(2))
    before = arith.addi(
        arith.select(is_odd, neighbour, zero), arith.select(in_second_pair, other_pair, zero)
    )
    return before, arith.addi(pair, other_pair)


def _halves(x: ir.Value) -> tuple[ir.Value, ir.Value]:
    return arith.andi(x, const(0xFFFF)), arith.shrui(x, const(16))

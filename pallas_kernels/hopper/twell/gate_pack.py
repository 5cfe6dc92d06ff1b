"""Gate matmul with a TwELL epilogue: `act(x @ w_gate^T)` leaves the registers packed.

The dense gate never reaches memory: the consumers of `matmul` pack their 64 x 256 accumulators
lane by lane and send them out by TMA.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels import quantised
from pallas_kernels.hopper.common import copies, lanes, matmul, simt, support
from pallas_kernels.hopper.common.matmul import Schedule
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import ACC_ROWS, CONSUMERS
from pallas_kernels.layouts import twell
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier

_WORDS = twell.TILE // twell.COMPRESSION
_PACKED = (plgpu.SwizzleTransform(128),)  # transforms of the SMEM that `_pack_tile` fills

_TUNED = {  # (D, H) of common shapes where another schedule was faster: benchmarks/tune.py
    (512, 1408): Schedule(grid_tile_width=4),
}


def gate_pack(
    x: Operand,
    w_gate: Operand,
    rectifier: Rectifier = RELU,
    *,
    dtype: jax.typing.DTypeLike | None = None,
    config: Schedule | None = None,
) -> jax.Array:
    """Computes `g = act(x @ w_gate^T)` in TwELL (arXiv 2603.23198); `twell` defines the format.

    Sums as `gate_union` does, rounds once and propagates NaN. The order of a tile's entries and the
    words past a row's count are unspecified.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_gate: `[H, D]` of the same dtype, H a multiple of 128 up to 65536. Or both are `Quantised`,
        with a scale for each row, and D is a multiple of 128.
      rectifier: act.
      dtype: bfloat16 or float16, that of the gate; None for that of x, if it is not `Quantised`.
      config: schedule; None for the one that suits D and H.

    Returns:
      uint32 `[M, ceil(H / 256), 32]`. Rows for which `twell.overflowed` holds have true counts but
      not all of their entries.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    dtype = support.check_gate_matmul(x, w_gate, dtype)
    m, (h, d) = x.shape[0], w_gate.shape
    tiles = pl.cdiv(h, twell.TILE)
    tokens, weight, scales = quantised.unscaled(x, w_gate)
    packed = matmul.matmul(
        tokens,
        (weight,),
        functools.partial(_pack, h=h, dtype=dtype, rectifier=rectifier),
        out_type=jax.ShapeDtypeStruct((m, tiles * _WORDS), jnp.uint32),
        scratch_types=dict(
            packed_smem=plgpu.SMEM((CONSUMERS, ACC_ROWS, _WORDS), jnp.uint32, transforms=_PACKED)
        ),
        schedule=config or _TUNED.get((d, h), Schedule()),
        scales=scales,
    )
    return packed.reshape(m, tiles, _WORDS)


def _pack(acc, slab, tile, packed_gmem, *, packed_smem, h, dtype, rectifier):
    if h % twell.TILE:  # columns past H are loaded as 0, but 0 * inf is NaN
        column = plgpu.broadcasted_iota(jnp.int32, acc.shape, 1, layout=plgpu.Layout.WGMMA)
        acc = jnp.where(column < h - tile * twell.TILE, acc, 0)
    mine = packed_smem.at[slab % CONSUMERS]
    _pack_tile(acc, dtype, tile, mine, rectifier)
    copies.commit()
    rows, columns = pl.ds(slab * ACC_ROWS, ACC_ROWS), pl.ds(tile * _WORDS, _WORDS)
    copies.store(mine, packed_gmem, (rows, columns), _PACKED)


_ROW_BYTES = 4 * _WORDS

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


@primitive
def _pack_tile(
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
      packed_ref: SMEM reference, uint32 `[64, 32]`, with transforms `_PACKED`. Words past a row's
        count keep what they held; a row that overflows holds any 31 of its entries.
      rectifier: what makes the gate of `acc`.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA,
            SCALAR,
            plgpu.RefType(_PACKED),
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
        leads = simt.equal(quad_lane, const(0))
        for address, count in zip((upper_row, lower_row), _halves(total), strict=True):
            mgpu.utils.inline_ptx("st.shared.b32 [$0], $1;", address, count, predicate=leads)

    step(acc, tile, packed_ref)


@_pack_tile.in_jax
def _(acc, dtype, tile, packed_ref, rectifier):
    packed = twell.pack(rectifier.gate(acc, dtype).astype(dtype))[:, 0]
    word = jnp.arange(packed.shape[1])
    is_entry = (word > 0) & (word <= packed[:, :1])
    packed_ref[...] = packed + jnp.where(is_entry, twell.TILE * tile, 0).astype(jnp.uint32)


def _count_nonzero(upper: list[ir.Value], lower: list[ir.Value]) -> ir.Value:
    """Counts a lane's non-zero values, those of its upper row in the low half of the result, those
    of its lower row in the high half."""
    one = const(0x00010001)
    upper_count, lower_count = (
        functools.reduce(arith.addi, [lanes.of_halves("min", pair, one) for pair in row])
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

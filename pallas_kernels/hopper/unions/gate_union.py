"""Gate matmul with a union epilogue: `act(x @ w_gate^T)` leaves the registers as tile unions.

The product is computed transposed: an accumulator has neurons along its rows and the 256 tokens of
a row tile along its columns. A neuron is in the union if its row is not all zero. Such a row is
stored, as 512 contiguous bytes; the dense gate never reaches memory.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from pallas_kernels import quantised
from pallas_kernels.hopper.common import lanes, matmul, simt, support
from pallas_kernels.hopper.common.matmul import Schedule
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import CONSUMERS
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, TILE_TOKENS
from pallas_kernels.quantised import Operand
from pallas_kernels.rectifiers import RELU, Rectifier

# With a width of 8, a quarter of the SMs would get the first tokens of all sequences, for which
# most neurons are active (docs/design/0003-gate-matmuls-and-twell.md).
_SCHEDULE = Schedule(grid_tile_width=7)

_WARP_WORDS = 64  # of a warp's counts: one byte for each of 256 columns
_WORKSPACE = 5 * _WARP_WORDS  # words of SMEM: the counts of four warps, and flags
_TOP_BITS = 0x80808080 - (1 << 32)  # bit 7 of each byte, as a signed int32


def gate_union(
    x: Operand,
    w_gate: Operand,
    rectifier: Rectifier = RELU,
    live: jax.Array | None = None,
    *,
    dtype: jax.typing.DTypeLike | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Computes `g = act(x @ w_gate^T)` as unions over row tiles; `tile_union` defines the format.

    Sums in float32, those of 8-bit floats in fewer bits, as tensor cores do (docs/design/0029);
    rounds once and propagates NaN.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192.
      w_gate: `[H, D]` of the same dtype, H a multiple of 128 up to 65536. Or both are `Quantised`,
        with a scale for each row, and D is a multiple of 128.
      rectifier: act.
      live: int32 `[1]`: neurons from this number on have gates of zero, and are not computed, but
        for those in the last 128 that are begun. None: all are computed.
      dtype: bfloat16 or float16, that of the gate; None for that of x, if it is not `Quantised`.

    Returns:
      gate: `[R, H, 256]`, R = ceil(M / 256); rows of neurons that are
        not in `masks[0]` are unspecified.
      masks: uint32 `[2, R, H / 32]`.
      counts: uint8 `[H / 64, R * 256]`.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    dtype = support.check_gate_matmul(x, w_gate, dtype)
    support.check_array("live", live, (1,), jnp.int32)
    m, h = x.shape[0], w_gate.shape[0]
    tokens, weight, scales = quantised.unscaled(x, w_gate)
    tiles = pl.cdiv(m, TILE_TOKENS)
    return matmul.matmul(
        weight,
        (tokens,),
        functools.partial(_epilogue, rectifier),
        out_type=(
            jax.ShapeDtypeStruct((tiles, h, TILE_TOKENS), dtype),
            jax.ShapeDtypeStruct((2, tiles, h // 32), jnp.uint32),
            jax.ShapeDtypeStruct((h // GROUP_NEURONS, tiles * TILE_TOKENS), jnp.uint8),
        ),
        scratch_types=dict(
            words=plgpu.SMEM((CONSUMERS, _WORKSPACE), jnp.uint32),
        ),
        schedule=_SCHEDULE,
        rows=live,
        leave_out=_leave_out,
        scales=scales and scales[::-1],
    )


def _epilogue(rectifier, acc, group, tile, gate, masks, counts, *, words):
    union_relu(
        acc,
        gate.at[tile, pl.ds(group * GROUP_NEURONS, GROUP_NEURONS)],
        *_description(group, tile, masks, counts),
        words.at[group % CONSUMERS],
        rectifier=rectifier,
        threshold=tile_union.OUTLYING_ABOVE,
    )


def _leave_out(group, tile, _, masks, counts):
    write_none(*_description(group, tile, masks, counts))


def _description(group, tile, masks, counts):
    """The parts of both masks and of the counts that describe 64 neurons of a tile."""
    bits = pl.ds(group * (GROUP_NEURONS // 32), GROUP_NEURONS // 32)
    tokens = pl.ds(tile * TILE_TOKENS, TILE_TOKENS)
    return masks.at[0, tile, bits], masks.at[1, tile, bits], counts.at[group, tokens]


@primitive
def union_relu(
    acc: jax.Array,
    gate_ref,
    used_ref,
    usual_ref,
    counts_ref,
    words_ref,
    *,
    rectifier: Rectifier,
    threshold: int,
) -> None:
    """Writes the gate of `acc` as tile unions hold it: 64 neurons, one per row, and 256 tokens.

    A transposing butterfly adds up the counts of a warp's 16 rows as bytes; the counts of the four
    warps are added in shared memory. Only if a token is outlying, which is rare, are the rows
    examined again without it. Rows that are not all zero are stored straight from the registers:
    there are few, and rearranging all rows would take longer than their short stores.

    Args:
      acc: float32 `[64, 256]` in the WGMMA layout. NaN propagates.
      gate_ref: GMEM `[64, 256]`, bfloat16 or float16. Rows that are all zero are not written.
      used_ref: GMEM, uint32 `[2]`, 64 bits, set for the rows that are not all zero.
      usual_ref: GMEM, uint32 `[2]`, the same without the outlying columns, whose count exceeds
        `threshold` or whose first row is not finite.
      counts_ref: GMEM, uint8 `[256]`, non-zeros of each column, plus 128 where the first row is not
        finite.
      words_ref: SMEM, uint32 `[_WORKSPACE]`, workspace.
      rectifier: what makes the gate of `acc`.
      threshold: from 0 to 63.
    """
    dtype = jnp.dtype(gate_ref.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *5 * [plgpu.RefType()]))
    def step(_, acc, gate_ref, used_ref, usual_ref, counts_ref, words_ref):
        lane, warp = simt.lane_and_warp()
        quad, quad_lane = arith.divui(lane, const(4)), arith.remui(lane, const(4))
        values = [lanes.elements(register) for register in acc.registers.flat]
        pairs = [lanes.gate_pair(rectifier, dtype, *value) for value in values]
        upper, lower = pairs[0::2], pairs[1::2]

        words = simt.smem_address(words_ref)
        row = arith.addi(words, arith.muli(warp, const(4 * _WARP_WORDS)))
        target = arith.addi(
            row, arith.muli(arith.addi(arith.muli(quad, const(8)), quad_lane), const(4))
        )
        for i, count in enumerate(_column_counts(upper, lower, lane)):
            simt.store_shared(target, 16 * i, count)
        any_not_finite = simt.barrier_any(_is_not_finite(values[0::2]))

        mine = arith.addi(words, arith.muli(lane, const(4)))
        counts = [_sum_of_warps(mine, offset) for offset in (0, 128)]
        outlying = functools.reduce(arith.ori, [_bytes_above(c, threshold) for c in counts])
        # ptxas knows that a ballot is uniform in the warp, and so does not serialize the WGMMAs.
        is_rare = lanes.nonzero(lanes.ballot(arith.ori(any_not_finite, lanes.nonzero(outlying))))

        used = _union(upper), _union(lower)
        examined = scf.IfOp(is_rare, 4 * [const(0).type], has_else=True)
        with ir.InsertionPoint(examined.then_block):
            scf.YieldOp(_usual_and_flags(values, upper, lower, words, threshold))
        with ir.InsertionPoint(examined.else_block):
            scf.YieldOp([*used, const(0), const(0)])
        *usual, low_flags, high_flags = examined.results
        _store_counts(counts_ref, counts, (low_flags, high_flags))

        is_used = _write_mask(used_ref, *used, lane, warp)
        _write_mask(usual_ref, *usual, lane, warp)
        row = arith.addi(arith.muli(warp, const(16)), quad)
        for first, pairs, is_mine in zip((0, 8), (upper, lower), is_used, strict=True):
            _store_row(gate_ref, arith.addi(row, const(first)), quad_lane, pairs, is_mine)

    step(acc, gate_ref, used_ref, usual_ref, counts_ref, words_ref)


@union_relu.in_jax
def _(acc, gate_ref, used_ref, usual_ref, counts_ref, words_ref, *, rectifier, threshold):
    assert threshold == tile_union.OUTLYING_ABOVE
    # 64 neurons that are never active pad H to the multiple of 128 that `pack` takes.
    z = jnp.pad(acc.T, ((0, 0), (0, GROUP_NEURONS)), constant_values=-1)
    gate, masks, counts = tile_union.pack(z, gate_ref.dtype, rectifier)
    gate_ref[...] = gate[0, :GROUP_NEURONS]
    used_ref[...], usual_ref[...] = masks[:, 0, :2]
    counts_ref[...] = counts[0]


@primitive
def write_none(used_ref, usual_ref, counts_ref) -> None:
    """Describes 64 neurons whose gates are all zero; for the arguments see `union_relu`."""

    @plgpu.inline_mgpu(arg_types=3 * [plgpu.RefType()])
    def step(_, used_ref, usual_ref, counts_ref):
        lane, warp = simt.lane_and_warp()
        zeros = 2 * [const(0)]  # 64 bits of a mask, 8 counts
        for mask_ref in used_ref, usual_ref:
            simt.store_words(mask_ref, const(0), zeros, simt.is_first_thread())
        counts = arith.muli(lane, const(2))
        simt.store_words(counts_ref, counts, zeros, simt.less(warp, const(1)))

    step(used_ref, usual_ref, counts_ref)


@write_none.in_jax
def _(*refs):
    for ref in refs:
        ref[...] = jnp.zeros(ref.shape, ref.dtype)


def _usual_and_flags(values, upper, lower, words, threshold: int) -> list[ir.Value]:
    """The lane's two rows without the outlying columns, and two words of the columns' flags."""
    lane, warp = simt.lane_and_warp()
    quad, quad_lane = arith.divui(lane, const(4)), arith.remui(lane, const(4))
    flags = arith.addi(words, const(4 * 4 * _WARP_WORDS))
    column = arith.muli(quad_lane, const(4))
    is_first_row = simt.equal(arith.ori(quad, warp), const(0))
    for i, flag in enumerate(_column_flags(values[0::2])):
        mgpu.utils.inline_ptx(
            f"st.shared.b32 [$0 + {16 * i}], $1;",
            arith.addi(flags, column),
            flag,
            predicate=is_first_row,
        )
    mgpu.warpgroup_barrier()
    usual = _usual_union(upper, lower, arith.addi(words, column), threshold)
    mine = arith.addi(flags, arith.muli(lane, const(4)))
    return [*usual, *(simt.load_shared(mine, offset) for offset in (0, 128))]


def _store_counts(counts_ref, counts, flags) -> None:
    """Stores two words of counts, and of flags, of each lane; see below for their columns."""
    lane, warp = simt.lane_and_warp()
    is_first_warp = simt.equal(warp, const(0))
    tokens = simt.gmem_address(counts_ref, arith.muli(lane, const(2)))
    for offset, count, flag in zip((0, 64), counts, flags, strict=True):
        count = lanes.ptx("prmt.b32 $0, $1, 0, 0x3120;", arith.ori(count, flag))
        ptx = f"""{{.reg .b16 near, far; mov.b32 {{near, far}}, $1;
            @$2 st.global.b16 [$0 + {offset}], near;
            @$2 st.global.b16 [$0 + {offset + 128}], far;}}"""
        mgpu.utils.inline_ptx(ptx, tokens, count, is_first_warp)


# Word 4 i + p of 64 holds a byte for each of four columns: from the lowest, c, c + 128, c + 1 and
# c + 129 with c = 8 i + 2 p. A lane's registers hold the columns with p = lane mod 4.


def _column_counts(upper, lower, lane) -> list[ir.Value]:
    """Non-zeros in each column of the warp's rows, in words i = 2 (lane / 4) + {0, 1}."""
    one = const(0x00010001)
    ones = [
        arith.addi(*(lanes.of_halves("min", pair, one) for pair in pairs))
        for pairs in zip(upper, lower, strict=True)
    ]
    words = [
        arith.addi(near, arith.shli(far, const(8)))
        for near, far in zip(ones[:16], ones[16:], strict=True)
    ]
    for distance in (16, 8, 4):
        is_high = lanes.nonzero(arith.andi(lane, const(distance)))
        half = len(words) // 2
        words = [
            arith.addi(
                arith.select(is_high, high, low),
                mgpu.utils.shfl_bfly(arith.select(is_high, low, high), distance),
            )
            for low, high in zip(words[:half], words[half:], strict=True)
        ]
    return words


def _sum_of_warps(address: ir.Value, offset: int) -> ir.Value:
    return functools.reduce(
        arith.addi, [simt.load_shared(address, offset + 4 * _WARP_WORDS * w) for w in range(4)]
    )


def _bytes_above(word: ir.Value, threshold: int) -> ir.Value:
    """A word with bit 7 set in each byte that exceeds `threshold`; bytes are at most 64."""
    above = arith.addi(word, const(0x01010101 * (127 - threshold)))
    return arith.andi(above, const(_TOP_BITS))


def _is_not_finite(values: list[list[ir.Value]]) -> ir.Value:
    """Whether any of the values is inf or NaN, which times zero is NaN."""
    f32 = ir.F32Type.get()
    zero = arith.constant(f32, 0.0)  # type: ignore[call-arg, arg-type]  # the stub does not match
    fma = functools.partial(mgpu.utils.inline_ptx, "fma.rn.f32 $0, $1, $2, $3;", result_types=f32)
    sums = [zero] * 4
    for i, value in enumerate(v for pair in values for v in pair):
        sums[i % 4] = fma(value, zero, sums[i % 4])
    total = functools.reduce(arith.addf, sums)
    return arith.cmpf(arith.CmpFPredicate.UNO, total, total)


def _column_flags(values: list[list[ir.Value]]) -> list[ir.Value]:
    """Words with bit 7 of a column's byte set if the lane's upper row is not finite there."""
    i32 = ir.IntegerType.get_signless(32)

    def flag(value):  # in bit 31: the carry from an exponent of all ones
        magnitude = arith.andi(mgpu.utils.bitcast(value, i32), const(0x7FFFFFFF))
        return arith.addi(magnitude, const(0x00800000))

    words = []
    for near, far in zip(values[:16], values[16:], strict=True):
        odd, even = (
            lanes.ptx("prmt.b32 $0, $1, $2, 0x0073;", flag(n), flag(f))
            for n, f in zip(near, far, strict=True)
        )
        word = lanes.ptx("prmt.b32 $0, $1, $2, 0x5410;", even, odd)
        words.append(arith.andi(word, const(_TOP_BITS)))
    return words


def _usual_union(upper, lower, column: ir.Value, threshold: int) -> tuple[ir.Value, ir.Value]:
    """`_union` of the lane's two rows without the outlying columns."""
    kept_upper, kept_lower = [], []
    for i in range(16):
        outlying = arith.ori(
            _bytes_above(_sum_of_warps(column, 16 * i), threshold),
            simt.load_shared(column, 16 * i + 4 * 4 * _WARP_WORDS),
        )
        for j, selector in ((i, 0xAA88), (i + 16, 0xBB99)):  # spreads bit 7 over 16 bits
            left_out = lanes.ptx(f"prmt.b32 $0, $1, 0, {selector};", outlying)
            kept = arith.xori(left_out, const(-1))
            kept_upper.append(arith.andi(upper[j], kept))
            kept_lower.append(arith.andi(lower[j], kept))
    return _union(kept_upper), _union(kept_lower)


def _union(pairs: list[ir.Value]) -> ir.Value:
    return functools.reduce(arith.ori, pairs)


def _write_mask(ref, upper: ir.Value, lower: ir.Value, lane, warp) -> list[ir.Value]:
    """Writes the warp's 16 bits of a mask: a row's is set if any of its lanes has a non-zero word.

    Returns whether the bits of the lane's upper and lower row are set.
    """
    first = arith.andi(lane, const(0x1C))  # the quad's first lane
    halves = [lanes.ballot(lanes.nonzero(bits)) for bits in (upper, lower)]
    is_set = [lanes.nonzero(arith.andi(arith.shrui(half, first), const(0xF))) for half in halves]
    # Lane i below 16 looks up row i.
    half = arith.select(simt.less(lane, const(8)), *halves)
    quad = arith.muli(arith.remui(lane, const(8)), const(4))
    is_row = lanes.nonzero(arith.andi(arith.shrui(half, quad), const(0xF)))
    mgpu.utils.inline_ptx(
        "{.reg .b16 bits, rest; mov.b32 {bits, rest}, $1; @$2 st.global.b16 [$0], bits;}",
        simt.gmem_address(ref, arith.muli(warp, const(2))),
        lanes.ballot(is_row),
        simt.less(lane, const(1)),
    )
    return is_set


def _store_row(
    gate_ref, row: ir.Value, quad_lane: ir.Value, pairs: list[ir.Value], is_used
) -> None:
    """Stores the quad's row of `gate_ref` if `is_used`."""
    offset = arith.addi(arith.muli(row, const(2 * 256)), arith.muli(quad_lane, const(16)))
    lanes.store_row(simt.gmem_address(gate_ref, offset), pairs, quad_lane, is_used)

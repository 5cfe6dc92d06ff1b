"""Pairs of a neuron and a token that fires it, among 16 neurons and a few tokens.

The values of 16 neurons for all tokens are an array as in `token_columns`. A pair is the word
`neuron | token << 8`, with the neuron from 0 to 15.
"""

import functools

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.device import gather, lanes, simt, token_columns, warpgroup
from pallas_kernels.hopper.device.simt import const
from pallas_kernels.hopper.device.token_columns import COLUMNS

_WARPS = 4
_CHUNK = 8  # columns in the 16 bytes that a lane loads at a time
_LOADS = 8  # 16-byte loads from each row that a lane keeps in flight


def list_pairs(values: jax.Array, tokens: int, pairs_ref, count_ref, open_ref) -> jax.Array:
    """Lists the pairs whose value is not zero, in no fixed order, and counts those of each token.

    Args:
      values: float32; NaN is not zero.
      tokens: only the first so many are looked at.
      pairs_ref: SMEM, uint32 `[values.size]`.
      count_ref: SMEM, int32 `[1]`, workspace.
      open_ref: GMEM, int32 `[values.size / 16]`; gets the number of pairs of each token added.

    Returns:
      int32 scalar, the number of pairs. All lanes can read them.
    """
    result = plgpu.ShapeDtypeStruct((), jnp.int32, layout=gather.SCALAR)
    how = token_columns.layout(values.size // COLUMNS)

    @plgpu.inline_mgpu(arg_types=(how, *(plgpu.RefType(),) * 3), return_type=result)
    def step(_, values, pairs_ref, count_ref, open_ref):
        ptx, i32 = mgpu.utils.inline_ptx, const(0).type
        column, token = token_columns.column_and_token()
        lane, _ = simt.lane_and_warp()
        pairs, count = simt.smem_address(pairs_ref), simt.smem_address(count_ref)
        ptx("@$1 st.shared.b32 [$0], 0;", count, simt.is_first_thread(), has_side_effects=True)
        mgpu.warpgroup_barrier()
        below = arith.subi(arith.shli(const(1), lane), const(1))
        zero = mgpu.c(0.0, ir.F32Type.get())
        # The first lane of a token's 16 adds up their bits.
        token_bits = arith.shli(const(0xFFFF), arith.andi(lane, const(16)))
        of_token = simt.gmem_address(open_ref, arith.muli(token, const(4)))
        is_first = simt.less(column, const(1))
        for i, register in enumerate(values.registers.flat):
            fires = arith.andi(
                arith.cmpf(arith.CmpFPredicate.UNE, token_columns.element(register), zero),
                simt.less(token, const(max(0, tokens - 8 * i))),
            )
            bits = lanes.ballot(fires)
            own_bits = arith.andi(bits, token_bits)
            ptx(
                f"{{.reg .b32 n; popc.b32 n, $1; @$2 red.global.add.u32 [$0 + {32 * i}], n;}}",
                of_token,
                own_bits,
                arith.andi(is_first, simt.less(const(0), own_bits)),
                has_side_effects=True,
            )
            # One addition for the warp; each lane's place follows from the lanes below it.
            start = ptx(
                """{.reg .b32 start, n;
                    mov.b32 start, 0;
                    popc.b32 n, $2;
                    @$3 atom.shared.add.u32 start, [$1], n;
                    shfl.sync.idx.b32 $0, start, 0, 31, -1;}""",
                count,
                bits,
                simt.less(lane, const(1)),
                result_types=i32,
                has_side_effects=True,
                convergent=True,
            )
            rank = ptx("popc.b32 $0, $1;", arith.andi(bits, below), result_types=i32)
            place = arith.addi(pairs, arith.muli(arith.addi(start, rank), const(4)))
            pair = arith.ori(column, arith.shli(arith.addi(token, const(8 * i)), const(8)))
            ptx("st.shared.b32 [$0], $1;", place, pair, predicate=fires)
        mgpu.warpgroup_barrier()
        total = ptx("ld.shared.b32 $0, [$1];", count, result_types=i32, has_side_effects=True)
        return mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return step(values, pairs_ref, count_ref, open_ref)


def are_few(open_ref, most: int, most_of_a_token: int) -> jax.Array:
    """Whether the counts in `open_ref` (GMEM, int32 `[n]`, n at most 64) are at most
    `most_of_a_token` each and `most` together, a bool scalar."""
    result = plgpu.ShapeDtypeStruct((), jnp.bool_, layout=gather.SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, open_ref):
        ptx, i32 = mgpu.utils.inline_ptx, const(0).type
        (size,) = ir.MemRefType(open_ref.type).shape
        lane, _ = simt.lane_and_warp()  # every warp looks at all counts
        address = simt.gmem_address(open_ref, arith.muli(lane, const(4)))
        first, second = (
            ptx(
                f"mov.b32 $0, 0; @$2 ld.global.b32 $0, [$1 + {4 * start}];",
                address,
                simt.less(lane, const(max(0, size - start))),
                result_types=i32,
                has_side_effects=True,
            )
            for start in (0, 32)
        )

        def reduce(operation, value):
            instruction = f"redux.sync.{operation}.u32 $0, $1, -1;"
            return ptx(instruction, value, result_types=i32, has_side_effects=True, convergent=True)

        total = reduce("add", arith.addi(first, second))
        largest = reduce("max", arith.maxui(first, second))
        few = arith.andi(
            simt.less(total, const(most + 1)), simt.less(largest, const(most_of_a_token + 1))
        )
        return mgpu.FragmentedArray.splat(few, (), is_signed=False)

    return step(open_ref)


def multiply_pairs(pairs_ref, count: jax.Array, x_ref, w_ref, first: jax.Array, out_ref) -> None:
    """Multiplies x and w for each pair: `out[token, neuron] = sum(x[token] * w[first + neuron])`.

    Each warp takes every fourth pair; the order of summation is fixed.

    Args:
      pairs_ref: SMEM, from `list_pairs`.
      count: int32 scalar, the number of pairs.
      x_ref: GMEM `[tokens, D]`, 16-bit.
      w_ref: GMEM `[H, D]`, the same dtype.
      first: int32 scalar, the first of the 16 neurons.
      out_ref: SMEM, float32 `[16 * tokens]`, tokens major. All lanes can read it.
    """

    @pl.loop(0, pl.cdiv(count, _WARPS))
    def _(i):
        _multiply_pairs(pairs_ref, count, x_ref, w_ref, first, out_ref, i * _WARPS)

    warpgroup.barrier()


def _multiply_pairs(pairs_ref, count, x_ref, w_ref, first, out_ref, start):
    ref = plgpu.RefType()

    @plgpu.inline_mgpu(arg_types=(ref, gather.SCALAR, ref, ref, gather.SCALAR, ref, gather.SCALAR))
    def step(_, pairs_ref, count, x_ref, w_ref, first, out_ref, start):
        ptx, i32, f32 = mgpu.utils.inline_ptx, const(0).type, ir.F32Type.get()
        kind = ir.MemRefType(x_ref.type)
        d, dtype = kind.shape[1], kind.element_type
        lane, warp = simt.lane_and_warp()
        index = arith.addi(start.registers.item(), warp)
        is_pair = simt.less(index, count.registers.item())
        pair = ptx(
            "mov.b32 $0, 0; @$2 ld.shared.b32 $0, [$1];",
            arith.addi(simt.smem_address(pairs_ref), arith.muli(index, const(4))),
            is_pair,
            result_types=i32,
            has_side_effects=True,
        )
        neuron, token = arith.andi(pair, const(0xFF)), arith.shrui(pair, const(8))
        row = arith.addi(first.registers.item(), neuron)
        addresses = [_row_address(ref, n, lane) for ref, n in ((x_ref, token), (w_ref, row))]
        total, wide = mgpu.c(0.0, f32), ir.VectorType.get((_CHUNK,), f32)
        for group in range(0, d, 32 * _CHUNK * _LOADS):
            starts = range(group, min(d, group + 32 * _CHUNK * _LOADS), 32 * _CHUNK)
            loaded = []
            for c in starts:
                is_inside = arith.andi(is_pair, simt.less(lane, const((d - c) // _CHUNK)))
                loaded.append([simt.load_chunk(a, 2 * c, is_inside) for a in addresses])
            for chunks in loaded:
                product = arith.mulf(*(arith.extf(wide, _vector(w, dtype)) for w in chunks))
                values = [vector.extract(product, [], [e]) for e in range(_CHUNK)]
                total = functools.reduce(arith.addf, values, total)
        for distance in (16, 8, 4, 2, 1):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        place = arith.addi(arith.muli(token, const(COLUMNS)), neuron)
        ptx(
            "st.shared.f32 [$0], $1;",
            arith.addi(simt.smem_address(out_ref), arith.muli(place, const(4))),
            total,
            predicate=arith.andi(is_pair, simt.less(lane, const(1))),
        )

    step(pairs_ref, count, x_ref, w_ref, first, out_ref, start)


def keep_rows(acc: jax.Array, out_ref) -> None:
    """Stores the first 16 rows of `acc` (float32 `[64, tokens]`, WGMMA layout), tokens major, to
    `out_ref` (SMEM, float32 `[16 * tokens]`). All lanes can read it."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def step(_, acc, out_ref):
        lane, warp = simt.lane_and_warp()
        row, pair = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        place = arith.addi(arith.muli(pair, const(2 * COLUMNS)), row)
        address = arith.addi(simt.smem_address(out_ref), arith.muli(place, const(4)))
        for i, register in enumerate(acc.registers.flat):
            eight, lower_rows = divmod(i, 2)
            for odd, value in enumerate(gather.elements(register, ir.F32Type.get())):
                offset = (8 * eight + odd) * COLUMNS + 8 * lower_rows
                mgpu.utils.inline_ptx(
                    f"st.shared.f32 [$0 + {4 * offset}], $1;",
                    address,
                    value,
                    predicate=simt.less(warp, const(1)),
                )
        mgpu.warpgroup_barrier()

    step(acc, out_ref)


def _row_address(ref: ir.Value, row: ir.Value, lane: ir.Value) -> ir.Value:
    """Where this lane's first chunk of a row of `ref: [rows, D]` lies."""
    i64 = ir.IntegerType.get_signless(64)
    size = mgpu.c(2 * ir.MemRefType(ref.type).shape[1], i64)
    chunk = simt.gmem_address(ref, arith.muli(lane, const(2 * _CHUNK)))
    return arith.addi(chunk, arith.muli(arith.extui(i64, row), size))


def _vector(words: list[ir.Value], dtype: ir.Type) -> ir.Value:
    words = vector.from_elements(ir.VectorType.get((4,), words[0].type), words)
    return mgpu.utils.bitcast(words, ir.VectorType.get((_CHUNK,), dtype))

"""The row-wise inner loop: one token against a gathered list of neurons.

One warpgroup of 128 lanes holds a row of D columns in registers, padded with zeros to a multiple of
1024 columns, in the strided layout: lane t has columns 1024 s + 8 t + {0, ..., 7}, one access for
every s, of 16 bytes (8 for 8-bit floats). The `inline_mgpu` steps supply what the Pallas language
lacks: predicated accesses, and one barrier for the sums of several rows.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import eight_bits, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import FLOAT32, SCALAR
from pallas_kernels.quantised import E4M3
from pallas_kernels.rectifiers import Rectifier

_LANES = 128  # of a warpgroup
_CHUNK = 16  # bytes of an access
_LANE_COLUMNS = 8  # columns in a 16-byte access
_PASS_COLUMNS = _LANES * _LANE_COLUMNS


def row_steps(d: int) -> int:
    """16-byte accesses per lane to a row of `d` columns."""
    return pl.cdiv(d, _PASS_COLUMNS)


def row_width(d: int) -> int:
    """Columns that a row of `d` columns takes in registers, padding included."""
    return row_steps(d) * _PASS_COLUMNS


def row_layout(d: int):
    """Layout of a row of `d` columns in registers."""
    return plgpu.Layout.WG_STRIDED((row_width(d),), vec_size=_LANE_COLUMNS)


def gather_ffn(
    x, entries_ref, count, w_up_ref, w_down_ref, sums_ref, rectifier: Rectifier, up_scale_ref=None
):
    """Sums `h_i w_down[n_i]` over the first `count` entries (n_i, g_i), h_i = g_i (x . w_up[n_i]).

    The weights of the next entries are loaded while the current ones are multiplied. The order of
    summation is fixed.

    Args:
      x: float32 row, or None for the non-gated form, where h_i = g_i.
      entries_ref: SMEM, uint32, words `n_i | bits(g_i) << 16`. Up to 2 * batch words past `count`
        are read and not used.
      count: int32 scalar.
      w_up_ref: GMEM `[H, D]`, as w_down or float8_e4m3fn; None if `x` is None.
      w_down_ref: GMEM `[H, D]`, bfloat16 or float16, which is also the dtype of g.
      sums_ref: SMEM, float32 `[>= 2, batch, 4]`, workspace; `batch` entries are loaded at a time.
        Other lanes may still read the first two elements afterwards.
      rectifier: what made the gate; it may pass `x . w_up[n_i]` through a ReLU.
      up_scale_ref: GMEM, float32 `[H]`, the scales of w_up's rows; None if it has none.

    Returns:
      The sum, a float32 row, and the float32 scalar `sum_i |h_i|`.
    """
    batch = sums_ref.shape[1]
    d = w_down_ref.shape[1]

    def neurons(first):
        return [(entries_ref[first + e] & 0xFFFF).astype(jnp.int32) for e in range(batch)]

    def fetch(w_ref, first):
        if w_ref is None:
            return []
        return [load_row(w_ref.at[n], first + e < count) for e, n in enumerate(neurons(first))]

    def scales(first):
        if up_scale_ref is None:
            return []
        # Words past `count` may hold anything.
        h = up_scale_ref.shape[0]
        return [up_scale_ref[jnp.minimum(n, h - 1)] for n in neurons(first)]

    def gate(i):
        bits = (entries_ref[i] >> 16).astype(jnp.uint16)
        return lax.bitcast_convert_type(bits, w_down_ref.dtype).astype(jnp.float32)

    def body(i, carry):
        up, up_scales, down, y, l1 = carry
        first, following = i * batch, (i + 1) * batch
        h = [gate(first + e) for e in range(batch)]
        if up:
            products = [x * widen(row) for row in up]
            up = fetch(w_up_ref, following)
            sums = sum_rows(products, sums_ref.at[i % 2])
            if up_scales:
                sums = [s * scale for s, scale in zip(sums, up_scales, strict=True)]
                up_scales = scales(following)
            h = [g * rectifier.linear(s) for g, s in zip(h, sums, strict=True)]
        for e, row in enumerate(down):
            h_e = jnp.where(first + e < count, h[e], 0.0)
            y += h_e * widen(row)
            l1 += jnp.abs(h_e)
        return up, up_scales, fetch(w_down_ref, following), y, l1

    zeros = plgpu.layout_cast(jnp.zeros(row_width(d), jnp.float32), row_layout(d))
    start = fetch(w_up_ref, 0), scales(0), fetch(w_down_ref, 0), zeros, jnp.float32(0)
    *_, y, l1 = lax.fori_loop(0, pl.cdiv(count, batch), body, start)
    return y, l1


@primitive
def load_row(ref, active: jax.Array) -> jax.Array:
    """Loads the row `ref: [D]` (GMEM, 16-bit or float8_e4m3fn, whose bits it returns as uint8); if
    not `active`, returns zeros without an access."""
    (d,), dtype = ref.shape, jnp.uint8 if ref.dtype == E4M3 else ref.dtype
    words = _LANE_COLUMNS * jnp.dtype(dtype).itemsize // 4
    row = plgpu.ShapeDtypeStruct((row_width(d),), dtype, layout=row_layout(d))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=row)
    def step(_, ref, active):
        chunks = []
        for address, offset, inside in _chunks(ref):
            inside = arith.andi(active.registers.item(), inside)
            loaded = simt.load_words(address, offset, inside, words)
            chunks.append(vector_of(loaded, mgpu.utils.dtype_to_ir_type(jnp.dtype(dtype))))
        return row_of(chunks, d, is_signed=False if dtype == jnp.uint8 else None)

    return step(ref, active)


@load_row.in_jax
def _load_row(ref, active):
    (d,) = ref.shape
    row = lax.cond(active, lambda: ref[...], lambda: jnp.zeros(d, ref.dtype))
    row = jnp.pad(row, (0, row_width(d) - d))
    return lax.bitcast_convert_type(row, jnp.uint8) if row.dtype == E4M3 else row


@primitive
def store_row(ref, row: jax.Array) -> None:
    """Stores the first D columns of `row` (16-bit) to `ref: [D]` (GMEM)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), row_layout(ref.shape[0])))
    def step(_, ref, row):
        for (address, offset, inside), chunk in zip(_chunks(ref), row.registers, strict=True):
            words = elements(chunk, ir.IntegerType.get_signless(32))
            _store_words(address, offset, words, inside)

    step(ref, row)


@store_row.in_jax
def _store_row(ref, row):
    ref[...] = row[: ref.shape[0]]


@primitive
def copy_row(source_ref, target_ref) -> None:
    """Copies a row `[D]` from GMEM to GMEM, of any dtype in which it has a multiple of 16 bytes."""
    size = source_ref.shape[0] * jnp.dtype(source_ref.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def step(_, source_ref, target_ref):
        lane = simt.thread()
        source, target = (
            simt.gmem_address(ref, arith.muli(lane, simt.const(_CHUNK)))
            for ref in (source_ref, target_ref)
        )
        chunks = []
        for offset in range(0, size, _LANES * _CHUNK):
            inside = simt.less(lane, simt.const((size - offset) // _CHUNK))
            chunks.append((offset, inside, simt.load_words(source, offset, inside)))
        for offset, inside, words in chunks:
            _store_words(target, offset, words, inside)

    step(source_ref, target_ref)


@copy_row.in_jax
def _copy_row(source_ref, target_ref):
    target_ref[...] = source_ref[...]


def copy_token(source, row: jax.Array, target, target_row: jax.Array) -> None:
    """Copies a row of tokens from GMEM to GMEM.

    Args:
      source, target: pytrees of references `[M, D]`, or `[M, 1]` to scales.
      row, target_row: int32 scalars.
    """
    for part, target_part in zip(jax.tree.leaves(source), jax.tree.leaves(target), strict=True):
        if part.shape[1] == 1:
            target_part[target_row, 0] = part[row, 0]
        else:
            copy_row(part.at[row], target_part.at[target_row])


def _store_words(address, offset, words, inside):
    mgpu.utils.inline_ptx(
        f"st.global.v4.b32 [$0 + {offset}], {{$1, $2, $3, $4}};", address, *words, predicate=inside
    )


@primitive
def prefetch_rows(ref, first: jax.Array, n: int) -> None:
    """Fetches rows `first` to `first + n - 1` of `ref: [H, D]` (GMEM, 16-bit) into L2, up to H."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR))
    def step(_, ref, first):
        i64 = ir.IntegerType.get_signless(64)
        h, d = ir.MemRefType(ref.type).shape
        base, lane = simt.gmem_address(ref, simt.const(0)), simt.thread()
        for start in range(0, n, _LANES):
            mine = arith.addi(lane, simt.const(start))
            row = arith.addi(first.registers.item(), mine)
            address = arith.addi(base, arith.muli(arith.extui(i64, row), mgpu.c(2 * d, i64)))
            mgpu.utils.inline_ptx(
                f"cp.async.bulk.prefetch.L2.global [$0], {2 * d};",
                address,
                predicate=arith.andi(simt.less(mine, simt.const(n)), simt.less(row, simt.const(h))),
            )

    step(ref, first)


@prefetch_rows.in_jax
def _prefetch_none(ref, first, n):
    del ref, first, n


@primitive
def widen(row: jax.Array) -> jax.Array:
    """Converts a row of `load_row` to float32."""
    if row.dtype == jnp.float16:
        return row.astype(jnp.float32)
    is_8_bits = row.dtype == jnp.uint8
    (d,) = row.shape
    wide = plgpu.ShapeDtypeStruct(row.shape, jnp.float32, layout=row_layout(d))

    # One instruction per value; the compiler's own conversion takes two for odd columns.
    @plgpu.inline_mgpu(arg_types=(row_layout(d),), return_type=wide)
    def step(_, row):
        i32 = ir.IntegerType.get_signless(32)
        chunks = []
        for chunk in row.registers:
            values = []
            for word in elements(chunk, i32):
                if is_8_bits:
                    values += [mgpu.utils.bitcast(v, i32) for v in eight_bits.from_e4m3(word)]
                else:
                    values.append(arith.shli(word, simt.const(16)))
                    values.append(arith.andi(word, simt.const(-1 << 16)))
            chunks.append(vector_of(values, ir.F32Type.get()))
        return row_of(chunks, d)

    return step(row)


@widen.in_jax
def _widen(row):
    if row.dtype == jnp.uint8:
        row = lax.bitcast_convert_type(row, E4M3)
    return row.astype(jnp.float32)


@primitive
def sum_rows(rows: list[jax.Array], scratch_ref, layout=None) -> list[jax.Array]:
    """Sums each of `rows` (float32) over its columns, in a fixed order, with one barrier for all.

    Every lane reads `scratch_ref` (SMEM, float32 `[>= len(rows), 4]`) after the barrier, so the
    next call needs another scratch. Rows are in the strided layout; None is `row_layout`.
    """
    layout = layout or row_layout(rows[0].size)

    @plgpu.inline_mgpu(
        arg_types=([layout] * len(rows), plgpu.RefType()), return_type=[FLOAT32] * len(rows)
    )
    def step(_, rows, scratch_ref):
        f32 = ir.F32Type.get()
        add = functools.partial(arith.addf, fastmath=arith.FastMathFlags.contract)
        lane, warp = simt.lane_and_warp()
        scratch = simt.smem_address(scratch_ref)
        column = arith.addi(scratch, arith.muli(warp, simt.const(4)))
        is_first = simt.less(lane, simt.const(1))
        for e, row in enumerate(rows):
            total = functools.reduce(add, [v for c in row.registers for v in elements(c, f32)])
            for distance in (16, 8, 4, 2, 1):
                total = add(total, mgpu.utils.shfl_bfly(total, distance))
            mgpu.utils.inline_ptx(
                f"st.shared.f32 [$0 + {16 * e}], $1;", column, total, predicate=is_first
            )
        mgpu.warpgroup_barrier()
        totals = []
        for e in range(len(rows)):
            warps = mgpu.utils.inline_ptx(
                f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {16 * e}];",
                scratch,
                result_types=[f32] * 4,
                has_side_effects=True,
            )
            totals.append(mgpu.FragmentedArray.splat(functools.reduce(add, warps), ()))
        return totals

    return step(rows, scratch_ref)


@sum_rows.in_jax
def _sum_rows(rows, scratch_ref, layout=None):
    del scratch_ref, layout
    return [jnp.sum(row) for row in rows]


def all_finite(row: jax.Array, scratch_ref) -> jax.Array:
    """Whether `row` (float32) has no inf and no NaN, a bool scalar; scratch as in `sum_rows`."""
    (total,) = sum_rows([row * 0.0], scratch_ref)
    return total == 0.0


def lane_columns(row: mgpu.FragmentedArray):
    """Yields the first column (i32) and the register of each of this lane's chunks of `row`."""
    lane = simt.thread()
    for i, chunk in enumerate(row.registers):
        yield (
            arith.addi(arith.muli(lane, simt.const(_LANE_COLUMNS)), simt.const(i * _PASS_COLUMNS)),
            chunk,
        )


def elements(x: ir.Value, dtype: ir.Type) -> list[ir.Value]:
    """Splits the bits of the vector `x` into values of `dtype`."""
    n = mgpu.bitwidth(x.type) // mgpu.bitwidth(dtype)
    x = mgpu.utils.bitcast(x, ir.VectorType.get((n,), dtype))
    return [vector.extract(x, [], [i]) for i in range(n)]


def _chunks(ref: ir.Value):
    """Yields, for each of this lane's chunks of `ref: [D]`, an address, the chunk's offset from it
    in bytes, and whether the chunk lies inside the row."""
    kind, lane = ir.MemRefType(ref.type), simt.thread()
    (d,), size = kind.shape, mgpu.bitwidth(kind.element_type) // 8
    address = simt.gmem_address(ref, arith.muli(lane, simt.const(size * _LANE_COLUMNS)))
    for start in range(0, d, _PASS_COLUMNS):
        yield address, size * start, simt.less(lane, simt.const((d - start) // _LANE_COLUMNS))


def row_of(
    chunks: list[ir.Value], d: int, *, is_signed: bool | None = None
) -> mgpu.FragmentedArray:
    """The row of `d` columns whose registers, in this lane, are `chunks`."""
    return mgpu.FragmentedArray(
        _registers=np.array(chunks, dtype=object),
        _layout=row_layout(d).to_mgpu(),
        _is_signed=is_signed,
    )


def vector_of(words: list[ir.Value], dtype: ir.Type) -> ir.Value:
    """Concatenates words of 32 bits into a vector of `dtype`."""
    i32 = ir.IntegerType.get_signless(32)
    n = len(words) * 32 // mgpu.bitwidth(dtype)
    words = vector.from_elements(ir.VectorType.get((len(words),), i32), words)
    return mgpu.utils.bitcast(words, ir.VectorType.get((n,), dtype))

"""Sixteen columns of a few tokens, spread over a warpgroup: what is done with finished sums.

The values of 16 neighbouring columns for all tokens are an array `[16 * tokens]`, float32, tokens
major: lane t of the warpgroup has column t mod 16 of the tokens t / 16, t / 16 + 8, and so on.
Tokens are a multiple of 8. The `inline_mgpu` steps move such arrays between registers and GMEM.
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import lanes, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const

COLUMNS = 16
_MOST_PREFETCHED = 8  # of 16 rows
_LANE_TOKENS = 8  # tokens from one register of a lane to the next


def layout(tokens: int):
    """Layout of the values of 16 columns for `tokens` tokens."""
    return plgpu.Layout.WG_STRIDED((COLUMNS * tokens,), vec_size=1)


def padded(tokens: int) -> int:
    """So many tokens, rounded up to a multiple of 8."""
    return pl.cdiv(tokens, _LANE_TOKENS) * _LANE_TOKENS


def zeros(tokens: int) -> jax.Array:
    """Zeros for the 16 columns."""
    return plgpu.layout_cast(jnp.zeros(COLUMNS * tokens, jnp.float32), layout(tokens))


def are_before(end: jax.Array, first: jax.Array, tokens: int) -> jax.Array:
    """Whether each of the columns `first` to `first + 15` is before `end`, for all tokens."""
    place = plgpu.broadcasted_iota(jnp.int32, (COLUMNS * tokens,), 0, layout=layout(tokens))
    return first + place % COLUMNS < end


@primitive
def add_parts(parts_ref) -> jax.Array:
    """Adds up `parts_ref` (SMEM, float32 `[parts, 16 * tokens]`) over parts, in a fixed order.

    A part is `[tokens / 2, 16, 2]`: two tokens lie side by side, as they do in a lane of WGMMA.
    """
    parts, size = parts_ref.shape
    result = plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=layout(size // COLUMNS))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, parts_ref):
        column, token = column_and_token()
        odd = arith.andi(token, const(1))
        place = arith.addi(arith.muli(arith.subi(token, odd), const(COLUMNS)), odd)
        place = arith.addi(place, arith.muli(column, const(2)))
        address = arith.addi(simt.smem_address(parts_ref), arith.muli(place, const(4)))
        totals = []
        for start in range(0, size, COLUMNS * _LANE_TOKENS):
            total = None
            for part in range(parts):
                value = mgpu.utils.inline_ptx(
                    f"ld.shared.f32 $0, [$1 + {4 * (part * size + start)}];",
                    address,
                    result_types=ir.F32Type.get(),
                    has_side_effects=True,
                )
                total = value if total is None else arith.addf(total, value)
            totals.append(total)
        return array(totals)

    return step(parts_ref)


@add_parts.in_jax
def _add_parts(parts_ref):
    total = jnp.sum(parts_ref[...], axis=0)
    return jnp.swapaxes(total.reshape(-1, COLUMNS, 2), 1, 2).reshape(-1)


@primitive
def load(ref, first: jax.Array, tokens: int) -> jax.Array:
    """Columns `first` to `first + 15` of `ref` (GMEM, floats of 16 or 32 bits): `[tokens, N]`, or
    one row `[N]` for all tokens."""
    row_columns = 0 if len(ref.shape) == 1 else ref.shape[1]
    result = plgpu.ShapeDtypeStruct((COLUMNS * tokens,), jnp.float32, layout=layout(tokens))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=result)
    def step(_, ref, first):
        dtype = ir.MemRefType(ref.type).element_type
        width, f32 = mgpu.bitwidth(dtype), ir.F32Type.get()
        values = []
        addresses = _addresses(ref, first.registers.item(), tokens, row_columns, width // 8)
        for address, offset in addresses:
            bits = mgpu.utils.inline_ptx(
                f"ld.global.b{width} $0, [$1 + {offset}];",
                address,
                result_types=ir.IntegerType.get_signless(width),
                has_side_effects=True,  # it must stay behind `await_previous`
            )
            value = mgpu.utils.bitcast(bits, dtype)
            values.append(value if width == 32 else arith.extf(f32, value))
        return array(values)

    return step(ref, first)


@load.in_jax
def _load(ref, first, tokens):
    rows = jnp.broadcast_to(ref[...], (tokens, ref.shape[-1]))
    return lax.dynamic_slice_in_dim(rows, first, COLUMNS, 1).astype(jnp.float32).reshape(-1)


@primitive
def store(ref, first: jax.Array, values: jax.Array) -> None:
    """Stores `values`, rounded to its dtype, to columns `first` on of `ref`: GMEM `[M, N]`. Tokens
    past its rows are not stored."""
    (rows, columns), tokens = ref.shape, values.size // COLUMNS
    values = values.astype(ref.dtype)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, layout(tokens)))
    def step(_, ref, first, values):
        size = mgpu.bitwidth(ir.MemRefType(ref.type).element_type) // 8
        addresses = _addresses(ref, first.registers.item(), tokens, columns, size)
        bits = ir.IntegerType.get_signless(8 * size)
        _, token = column_and_token()
        starts = range(0, tokens, _LANE_TOKENS)
        places = zip(starts, addresses, values.registers.flat, strict=True)
        for start, (address, offset), value in places:
            is_whole = start + _LANE_TOKENS <= rows
            mgpu.utils.inline_ptx(
                f"st.global.b{8 * size} [$0 + {offset}], $1;",
                address,
                mgpu.utils.bitcast(element(value), bits),
                predicate=None if is_whole else simt.less(token, const(rows - start)),
                has_side_effects=True,
            )

    step(ref, first, values)


@store.in_jax
def _store(ref, first, values):
    rows = values.reshape(-1, COLUMNS)[: ref.shape[0]]
    ref[:, pl.ds(first, COLUMNS)] = rows.astype(ref.dtype)


@primitive
def inverse_rms(squares_ref, columns: int, eps: float) -> jax.Array:
    """`rsqrt(sum(squares) / columns + eps)` of each token, the same for its 16 columns.

    Args:
      squares_ref: GMEM, float32 `[tokens, parts]`.
      columns: number of columns that the squares are of.
      eps: what is added to the mean.
    """
    tokens, parts = squares_ref.shape
    result = plgpu.ShapeDtypeStruct((COLUMNS * tokens,), jnp.float32, layout=layout(tokens))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, squares_ref):
        f32 = ir.F32Type.get()
        column, _ = column_and_token()
        zero, sums = mgpu.c(0.0, f32), []
        for address, offset in _addresses(squares_ref, const(0), tokens, parts, 4):
            total = zero
            for start in range(0, parts, COLUMNS):
                is_part = simt.less(column, const(parts - start))
                total = arith.addf(total, _load_f32(address, offset + 4 * start, is_part))
            sums.append(_sum_over_columns(total))
        return array(sums)

    return lax.rsqrt(step(squares_ref) * (1 / columns) + eps)


@inverse_rms.in_jax
def _inverse_rms(squares_ref, columns, eps):
    mean = jnp.sum(squares_ref[...], axis=1) / columns
    return jnp.repeat(lax.rsqrt(mean + eps), COLUMNS)


@primitive
def inverse_rms_of_one(squares_ref, columns: int, eps: float) -> jax.Array:
    """As `inverse_rms`, for one token, `squares_ref: [parts]`: a float32 scalar."""
    result = plgpu.ShapeDtypeStruct((), jnp.float32, layout=SCALAR)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, squares_ref):
        f32 = ir.F32Type.get()
        (parts,) = ir.MemRefType(squares_ref.type).shape
        lane, _ = simt.lane_and_warp()  # every warp adds all up
        address = simt.gmem_address(squares_ref, arith.muli(lane, const(4)))
        total = mgpu.c(0.0, f32)
        for start in range(0, parts, 32):
            value = _load_f32(address, 4 * start, simt.less(lane, const(parts - start)))
            total = arith.addf(total, value)
        for distance in (1, 2, 4, 8, 16):
            total = arith.addf(total, mgpu.utils.shfl_bfly(total, distance))
        return mgpu.FragmentedArray.splat(total, ())

    return lax.rsqrt(step(squares_ref) * (1 / columns) + eps)


@inverse_rms_of_one.in_jax
def _inverse_rms_of_one(squares_ref, columns, eps):
    return lax.rsqrt(jnp.sum(squares_ref[...]) / columns + eps)


@primitive
def prefetch_rows(w_ref, first: jax.Array, values: jax.Array, tokens: int) -> None:
    """Prefetches into L2 row `first + c` of `w_ref` (GMEM `[H, D]`) for each of the 16 columns c
    that has a value above zero for one of the first `tokens` tokens.

    A warp has some of the tokens. If more than `_MOST_PREFETCHED` columns have a value in them, it
    prefetches none: gates are dense then, and all rows together would push each other out of L2.
    """
    how, item = layout(values.size // COLUMNS), jnp.dtype(w_ref.dtype).itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, how))
    def step(_, w_ref, first, values):
        i64 = ir.IntegerType.get_signless(64)
        column, token = column_and_token()
        lane, _ = simt.lane_and_warp()
        zero = mgpu.c(0.0, ir.F32Type.get())
        is_active = const(0)
        for i, value in enumerate(values.registers.flat):
            is_above = arith.cmpf(arith.CmpFPredicate.OGT, element(value), zero)
            is_token = simt.less(token, const(max(0, tokens - _LANE_TOKENS * i)))
            of_value = arith.extui(const(0).type, arith.andi(is_above, is_token))
            is_active = arith.ori(is_active, of_value)
        # The lane of the same column.
        is_active = arith.ori(is_active, mgpu.utils.shfl_bfly(is_active, 16))
        is_above = lanes.nonzero(is_active)
        is_first = simt.less(lane, const(COLUMNS))
        columns = lanes.popcount(lanes.ballot(arith.andi(is_above, is_first)))
        are_few = simt.less(columns, const(_MOST_PREFETCHED + 1))
        is_wanted = arith.andi(arith.andi(is_above, is_first), are_few)
        row = arith.extui(i64, arith.addi(first.registers.item(), column))
        size = item * ir.MemRefType(w_ref.type).shape[1]
        place = arith.muli(row, mgpu.c(size, i64))
        address = arith.addi(simt.gmem_address(w_ref, const(0)), place)
        mgpu.utils.inline_ptx(
            f"cp.async.bulk.prefetch.L2.global [$0], {size};", address, predicate=is_wanted
        )

    step(w_ref, first, values)


@prefetch_rows.in_jax
def _prefetch_none(w_ref, first, values, tokens):
    del w_ref, first, values, tokens


@primitive
def store_sums(sums_ref, part: jax.Array, values: jax.Array) -> None:
    """Stores each token's sum over its 16 `values` to `sums_ref[:, part]`: GMEM, float32
    `[tokens, parts]`."""
    tokens = values.size // COLUMNS

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, layout(tokens)))
    def step(_, sums_ref, part, values):
        column, _ = column_and_token()
        first = arith.subi(part.registers.item(), column)  # a token's lanes share the address
        parts = ir.MemRefType(sums_ref.type).shape[1]
        addresses = _addresses(sums_ref, first, tokens, parts, 4)
        for (address, offset), value in zip(addresses, values.registers.flat, strict=True):
            total = _sum_over_columns(element(value))
            mgpu.utils.inline_ptx(
                f"st.global.f32 [$0 + {offset}], $1;",
                address,
                total,
                predicate=simt.less(column, const(1)),
            )

    step(sums_ref, part, values)


@store_sums.in_jax
def _store_sums(sums_ref, part, values):
    sums_ref[:, pl.ds(part, 1)] = jnp.sum(values.reshape(-1, COLUMNS), axis=1, keepdims=True)


@primitive
def store_total(sums_ref, share: jax.Array, shares: int, total: jax.Array) -> None:
    """Stores `total` (float32 scalar) and zeros to the `share`-th of so many equal shares of
    `sums_ref` (GMEM, float32 `[parts]`)."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, SCALAR))
    def step(_, sums_ref, share, total):
        size = ir.MemRefType(sums_ref.type).shape[0] // shares
        lane = arith.andi(mgpu.thread_idx(), const(127))
        is_first = simt.less(lane, const(1))
        zero = mgpu.c(0.0, ir.F32Type.get())
        place = arith.addi(arith.muli(share.registers.item(), const(size)), lane)
        address = simt.gmem_address(sums_ref, arith.muli(place, const(4)))
        for start in range(0, size, 128):
            value = arith.select(is_first, total.registers.item(), zero) if start == 0 else zero
            mgpu.utils.inline_ptx(
                f"st.global.f32 [$0 + {4 * start}], $1;",
                address,
                value,
                predicate=simt.less(lane, const(size - start)),
            )

    step(sums_ref, share, total)


@store_total.in_jax
def _store_total(sums_ref, share, shares, total):
    size = sums_ref.shape[0] // shares
    sums_ref[pl.ds(share * size, size)] = jnp.where(jnp.arange(size) == 0, total, 0.0)


def column_and_token() -> tuple[ir.Value, ir.Value]:
    """This lane's column, and its first token, i32."""
    lane = arith.andi(mgpu.thread_idx(), const(127))
    return arith.remui(lane, const(COLUMNS)), arith.divui(lane, const(COLUMNS))


def _addresses(
    ref: ir.Value, first: ir.Value, tokens: int, row_columns: int, size: int
) -> Iterator[tuple[ir.Value, int]]:
    """For each register of this lane, an address and an offset from it, in bytes; elements of
    `ref` have `size` bytes and its rows `row_columns` columns (0: all tokens have the same row)."""
    column, token = column_and_token()
    index = arith.addi(arith.muli(token, const(row_columns)), arith.addi(first, column))
    address = simt.gmem_address(ref, arith.muli(index, const(size)))
    for start in range(0, tokens, _LANE_TOKENS):
        yield address, size * start * row_columns


def _load_f32(address: ir.Value, offset: int, active: ir.Value) -> ir.Value:
    """A float32 of GMEM, or 0 if not `active`; the load stays behind `await_previous`."""
    return mgpu.utils.inline_ptx(
        f"mov.b32 $0, 0; @$2 ld.global.f32 $0, [$1 + {offset}];",
        address,
        active,
        result_types=ir.F32Type.get(),
        has_side_effects=True,
    )


def _sum_over_columns(value: ir.Value) -> ir.Value:
    for distance in (1, 2, 4, 8):
        value = arith.addf(value, mgpu.utils.shfl_bfly(value, distance))
    return value


def element(register: ir.Value) -> ir.Value:
    """The value in a register of such an array."""
    return vector.extract(register, [], [0])


def array(values: list[ir.Value]) -> mgpu.FragmentedArray:
    one = ir.VectorType.get((1,), ir.F32Type.get())
    registers = np.array([vector.from_elements(one, [v]) for v in values], dtype=object)
    how = layout(_LANE_TOKENS * len(values))
    return mgpu.FragmentedArray(_registers=registers, _layout=how.to_mgpu(), _is_signed=None)

"""Rounding of few tokens to 8-bit floats on their way into a product.

The four thread blocks of a subcluster have a quarter of the columns each. A token's scale follows
from its largest magnitude, so each block finds the largest of its quarter and sends it to all.

Sixteen neighbouring lanes have a token, as in `token_columns`. They read 128 columns at a time, 16
bytes each, which become a row of a tile in shared memory (`tiles.tiled`).
"""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import eight_bits, register_rows, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import tiled
from pallas_kernels.hopper.decode import cluster, on_host, token_columns
from pallas_kernels.quantised import E4M3, rounded

STAGE = 128  # columns that are rounded at a time
_TOKENS = 8  # whose rows the lanes read at a time, and a tile has
_CHUNK = 8  # columns of a lane
_IN_FLIGHT = 8  # chunks that a lane loads before it looks at them


@primitive
def largest(x_ref, first: jax.Array, columns: int) -> jax.Array:
    """The largest magnitude of each token in some columns, an array of `token_columns`.

    Args:
      x_ref: GMEM `[M, K]`, 16-bit, K a multiple of 8. What is past M or K counts as zeros.
      first: int32 scalar, the first of the columns.
      columns: their number, a multiple of 128.
    """
    shape, dtype = x_ref.shape, jnp.dtype(x_ref.dtype)
    tokens = token_columns.padded(shape[0])

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR), return_type=_of_tokens(tokens))
    def step(_, x_ref, first):
        tops = []
        for token in range(0, tokens, _TOKENS):
            chunks = list(_chunks(x_ref, first, token, columns, shape))
            tops.append(const(0))
            for start in range(0, len(chunks), _IN_FLIGHT):
                loads = [simt.load_chunk(*chunk) for chunk in chunks[start : start + _IN_FLIGHT]]
                words = [tops[-1], *(word for load in loads for word in load)]
                tops[-1] = eight_bits.larger(words)
        return token_columns.array(
            [eight_bits.largest([top], dtype, lanes=token_columns.COLUMNS) for top in tops]
        )

    return step(x_ref, first)


@largest.in_jax
def _largest(x_ref, first, columns):
    return _by_lane(jnp.max(jnp.abs(_columns_of(x_ref, first, columns)), axis=1))


@primitive
def scales(
    parts: jax.Array, block: jax.Array, parts_ref, arrived_ref
) -> tuple[jax.Array, jax.Array]:
    """The scale of each token and its reciprocal, arrays of `token_columns`.

    Args:
      parts: from `largest`, of this block's columns.
      block: int32 scalar, this block's rank in the cluster, as of `cluster.exchange_columns`.
      parts_ref: SMEM, float32, at least `4 * tokens`, workspace.
      arrived_ref: of `cluster.prepare`; no exchange has been expected that has not ended.
    """
    tokens = parts.size // token_columns.COLUMNS
    blocks = 4
    cluster.expect(4 * blocks * tokens, arrived_ref)
    how = token_columns.layout(tokens)

    @plgpu.inline_mgpu(arg_types=(how, SCALAR, plgpu.RefType(), plgpu.RefType()))
    def send(_, parts, block, parts_ref, arrived_ref):
        lane, token = token_columns.column_and_token()
        to = arith.remui(lane, const(blocks))
        part, receiver = cluster.in_subcluster(block.registers.item(), to)
        place = arith.addi(arith.muli(part, const(tokens)), token)
        place = arith.addi(simt.smem_address(parts_ref), arith.muli(place, const(4)))
        words = [token_columns.element(part) for part in parts.registers.flat]
        is_sender = simt.less(lane, const(blocks))
        cluster.send_words(words, place, 4 * _TOKENS, receiver, arrived_ref, is_sender)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=2 * (_of_tokens(tokens),))
    def receive(_, parts_ref):
        _, token = token_columns.column_and_token()
        address = arith.addi(simt.smem_address(parts_ref), arith.muli(token, const(4)))
        found = []
        for start in range(0, tokens, _TOKENS):
            tops = [_load_shared(address, 4 * (b * tokens + start)) for b in range(blocks)]
            top = tops[0]
            for other in tops[1:]:  # their bits are ordered as magnitudes are, NaN last
                top = arith.maxui(top, other)
            found.append(eight_bits.scale_and_reciprocal(mgpu.utils.bitcast(top, ir.F32Type.get())))
        return tuple(token_columns.array(list(values)) for values in zip(*found, strict=True))

    send(parts, block, parts_ref, arrived_ref)
    cluster.wait_for_parts(arrived_ref)
    return receive(parts_ref)


@scales.in_jax
def _scales(parts, block, parts_ref, arrived_ref):
    del parts_ref, arrived_ref
    top = jnp.max(on_host.of_all(parts, block, 4), axis=0)
    scale = rounded(top[:, None]).scale[:, 0]
    return scale, 1 / scale


@primitive
def store(x_ref, first: jax.Array, reciprocal: jax.Array, target_ref) -> None:
    """Rounds 128 columns of each token into shared memory, for the products that follow.

    Args:
      x_ref: GMEM `[M, K]`, 16-bit, K a multiple of 8. What is past M or K becomes zeros.
      first: int32 scalar, the first of the columns.
      reciprocal: of the scales, from `scales`.
      target_ref: SMEM, float8_e4m3fn `[tokens, 128]`, M rounded up to a multiple of 8, with the
        transforms `tiles.tiled`.
    """
    shape, dtype = x_ref.shape, jnp.dtype(x_ref.dtype)
    tokens, _ = target_ref.shape
    how = token_columns.layout(tokens)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, how, plgpu.RefType(tiled(E4M3))))
    def step(_, x_ref, first, reciprocal, target_ref):
        lane, row = token_columns.column_and_token()
        # A row of a tile has 128 bytes; its chunks of 16 bytes are swizzled.
        chunk = arith.muli(arith.xori(arith.shrui(lane, const(1)), row), const(16))
        half = arith.muli(arith.andi(lane, const(1)), const(8))
        place = arith.addi(arith.muli(row, const(STAGE)), arith.addi(chunk, half))
        place = arith.addi(simt.smem_address(target_ref), place)
        loads = [
            simt.load_chunk(*chunk)
            for token in range(0, tokens, _TOKENS)
            for chunk in _chunks(x_ref, first, token, STAGE, shape)
        ]
        for tile, (words, factor) in enumerate(zip(loads, reciprocal.registers.flat, strict=True)):
            factor = token_columns.element(factor)
            mgpu.utils.inline_ptx(
                f"st.shared.v2.b32 [$0 + {tile * _TOKENS * STAGE}], {{$1, $2}};",
                place,
                *(eight_bits.rounded(words[i : i + 2], factor, dtype) for i in (0, 2)),
                has_side_effects=True,
            )
        mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;", has_side_effects=True)
        mgpu.warpgroup_barrier()

    step(x_ref, first, reciprocal, target_ref)


@store.in_jax
def _store(x_ref, first, reciprocal, target_ref):
    factor = reciprocal[:: token_columns.COLUMNS, None]
    target_ref[...] = (_columns_of(x_ref, first, STAGE) * factor).astype(E4M3)


def _columns_of(x_ref, first, columns):
    """So many columns of all tokens, float32; zeros past M and K."""
    m, _ = x_ref.shape
    x = jnp.pad(x_ref[...], ((0, token_columns.padded(m) - m), (0, 4 * columns)))
    return lax.dynamic_slice_in_dim(x, first, columns, axis=1).astype(jnp.float32)


def _by_lane(of_tokens):
    return jnp.repeat(of_tokens, token_columns.COLUMNS)


@primitive
def round_row(row: jax.Array, scratch_ref) -> jax.Array:
    """Rounds a row to 8-bit floats; float32, the numbers that they stand for.

    Args:
      row: 16-bit, as `register_rows.load_row` gives it.
      scratch_ref: SMEM, four words; it is free again afterwards.
    """
    dtype, (width,) = jnp.dtype(row.dtype), row.shape
    how = register_rows.row_layout(width)
    wide = plgpu.ShapeDtypeStruct(row.shape, jnp.float32, layout=how)

    @plgpu.inline_mgpu(arg_types=(how, plgpu.RefType()), return_type=wide)
    def step(_, row, scratch_ref):
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        lane, warp = simt.lane_and_warp()
        scratch = simt.smem_address(scratch_ref)
        words = [register_rows.elements(chunk, i32) for chunk in row.registers.flat]
        top = eight_bits.largest([word for chunk in words for word in chunk], dtype)
        mgpu.utils.inline_ptx(
            "st.shared.f32 [$0], $1;",
            arith.addi(scratch, arith.muli(warp, const(4))),
            top,
            predicate=simt.less(lane, const(1)),
        )
        mgpu.warpgroup_barrier()
        tops = [_load_shared(scratch, 4 * w) for w in range(4)]
        for other in tops[1:]:
            tops[0] = arith.maxui(tops[0], other)
        scale, reciprocal = eight_bits.scale_and_reciprocal(mgpu.utils.bitcast(tops[0], f32))
        chunks = []
        for chunk in words:
            halves = (eight_bits.rounded(chunk[i : i + 2], reciprocal, dtype) for i in (0, 2))
            values = [value for half in halves for value in eight_bits.from_e4m3(half)]
            bits = [mgpu.utils.bitcast(arith.mulf(value, scale), i32) for value in values]
            chunks.append(register_rows.vector_of(bits, f32))
        mgpu.warpgroup_barrier()
        return register_rows.row_of(chunks, width)

    return step(row, scratch_ref)


@round_row.in_jax
def _round_row(row, scratch_ref):
    del scratch_ref
    found = rounded(row[None])
    return (found.values.astype(jnp.float32) * found.scale)[0]


def _of_tokens(tokens: int):
    size = token_columns.COLUMNS * tokens
    return plgpu.ShapeDtypeStruct((size,), jnp.float32, layout=token_columns.layout(tokens))


def _chunks(
    x_ref: ir.Value, first: mgpu.FragmentedArray, token: int, columns: int, shape: tuple[int, int]
) -> Iterator[tuple[ir.Value, int, ir.Value]]:
    """What `simt.load_chunk` takes for this lane's chunks of the 8 tokens from `token` on."""
    m, k = shape
    lane, row = token_columns.column_and_token()
    column = arith.addi(first.registers.item(), arith.muli(lane, const(_CHUNK)))
    index = arith.addi(arith.muli(row, const(k)), column)
    address = simt.gmem_address(x_ref, arith.muli(index, const(2)))
    for start in range(0, columns, STAGE):
        inside = simt.less(arith.addi(column, const(start)), const(k))
        if m < token + _TOKENS:
            inside = arith.andi(inside, simt.less(row, const(m - token)))
        yield address, 2 * (token * k + start), inside


def _load_shared(address: ir.Value, offset: int) -> ir.Value:
    return mgpu.utils.inline_ptx(
        f"ld.shared.b32 $0, [$1 + {offset}];",
        address,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )

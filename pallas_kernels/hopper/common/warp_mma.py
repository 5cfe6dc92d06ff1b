"""Products of warps by `mma.sync`, for GPUs without WGMMA.

Of a wide result `[64, N]` the four warps of a warpgroup have the quarters: 32 rows and half of the
columns each, so that they read operands from shared memory less often than with 16 rows and all
columns, as in a WGMMA accumulator. `in_wgmma_layout` exchanges halves between two warps at the end.
Of a narrow result they have 16 rows each.
"""

import itertools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import tiled

_CHUNK = 16  # bytes of a row of `ldmatrix`
_K_BYTES = 32  # of the contracted axis in an instruction
_LANES = 128
_WIDE = 128  # columns of a result from which on warps have its quarters
_KINDS = {"bfloat16": ("k16", "bf16"), "float16": ("k16", "f16"), "float8_e4m3fn": ("k32", "e4m3")}


@primitive
def multiply(acc: jax.Array, a_ref, b_ref, *, a_by_k: bool, b_by_k: bool) -> jax.Array:
    """Adds a product to the parts that warps have.

    Args:
      acc: float32 `[64, N]`; of quarters a lane's registers are those of a WGMMA accumulator in
        number and type, not in what they hold. N is a multiple of 8; if not `b_by_k`, 64 or a
        multiple of 128.
      a_ref: SMEM `[64, K]` if `a_by_k`, else `[K, 64]`, 16-bit, or 8-bit if both are by K.
      b_ref: SMEM `[N, K]` if `b_by_k`, else `[K, N]`. Both have transforms `tiled`, with tiles of
        128 bytes, or of as many as a row has.
    """
    types = [plgpu.RefType(tiled(r.dtype, r.shape[1])) for r in (a_ref, b_ref)]
    columns, dtype = acc.shape[1], jnp.dtype(a_ref.dtype)
    k = a_ref.shape[1 if a_by_k else 0]
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, *types), return_type=result)
    def step(_, acc, a_ref, b_ref):
        lane, warp = simt.lane_and_warp()
        if _has_quarters(columns):
            rows, width = 32, columns // 2
            row = arith.muli(arith.shrui(warp, const(1)), const(rows))
            column = arith.muli(arith.andi(warp, const(1)), const(width))
        else:
            rows, width = 16, columns
            row, column = arith.muli(warp, const(rows)), const(0)
        a = _Matrix(a_ref, a_by_k, dtype, row, lane, is_b=False)
        b = _Matrix(b_ref, b_by_k, dtype, column, lane, is_b=True)
        sums = [
            vector.extract(register, [], [i]) for register in acc.registers.flat for i in range(2)
        ]
        for k_bytes in range(0, k * dtype.itemsize, _K_BYTES):
            a_tiles = [a.load(row, k_bytes) for row in range(0, rows, 16)]
            for column in range(0, width, 16):
                tiles = min(2, (width - column) // 8)
                b_tiles = b.load(column, k_bytes, 2 * tiles)
                for (t, a_tile), half in itertools.product(enumerate(a_tiles), range(tiles)):
                    # Of 16 rows and 8 columns a lane has four numbers.
                    at = 4 * ((t * width + column) // 8 + half)
                    b_tile = b_tiles[2 * half : 2 * half + 2]
                    sums[at : at + 4] = _mma(dtype, sums[at : at + 4], a_tile, b_tile)
        return _array(sums, acc)

    return step(acc, a_ref, b_ref)


@multiply.in_jax
def _(acc, a_ref, b_ref, *, a_by_k, b_by_k):
    a, b = (ref[...].astype(jnp.float32) for ref in (a_ref, b_ref))
    return acc + jnp.dot(a if a_by_k else a.T, b.T if b_by_k else b)


def _has_quarters(columns: int) -> bool:
    return columns >= _WIDE and columns % 16 == 0


def in_wgmma_layout(acc: jax.Array, scratch: Callable[[], Any] | None) -> jax.Array:
    """The parts of `multiply` in the layout of a WGMMA accumulator, float32 `[64, N]`.

    Args:
      acc: the parts.
      scratch: called if they are quarters, returns SMEM of a multiple of 2048 bytes in one piece,
        with transforms `tiled`. All copies from it have ended.
    """
    if not _has_quarters(acc.shape[1]):
        return acc
    assert scratch is not None
    return _exchanged(acc, scratch())


@primitive
def _exchanged(acc: jax.Array, scratch_ref) -> jax.Array:
    """`in_wgmma_layout` of quarters: two warps with the same 32 rows exchange 16 of them."""
    scratch_type = plgpu.RefType(tiled(scratch_ref.dtype, scratch_ref.shape[1]))
    result = plgpu.ShapeDtypeStruct(acc.shape, jnp.float32, layout=plgpu.Layout.WGMMA)
    room = scratch_ref.size * jnp.dtype(scratch_ref.dtype).itemsize // (_CHUNK * _LANES)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, scratch_type), return_type=result)
    def step(_, acc, scratch_ref):
        _, warp = simt.lane_and_warp()
        is_right = arith.cmpi(arith.CmpIPredicate.ne, arith.andi(warp, const(1)), const(0))
        registers = list(acc.registers.flat)
        upper, lower = registers[: len(registers) // 2], registers[len(registers) // 2 :]
        kept, given = [], []
        for first, second in zip(upper, lower, strict=True):
            kept.append(arith.select(is_right, second, first))
            given.append(arith.select(is_right, first, second))
        scratch = simt.smem_address(scratch_ref)
        got = _from_partner(given, scratch, room)
        left = [arith.select(is_right, *pair) for pair in zip(got, kept, strict=True)]
        right = [arith.select(is_right, *pair) for pair in zip(kept, got, strict=True)]
        return _like(acc, [*left, *right])

    return step(acc, scratch_ref)


@_exchanged.in_jax
def _(acc, scratch_ref):
    scratch_ref[...] = jnp.full(scratch_ref.shape, jnp.nan, scratch_ref.dtype)
    plgpu.commit_smem()
    return acc


class _Matrix:
    """The part of an operand in SMEM that a warp multiplies: loads of its tiles by `ldmatrix`.

    Tiles of 8 rows follow each other in memory, in the order of columns and then of rows. A row of
    a tile has 32 to 128 bytes, in chunks of 16 that are swizzled: where a chunk lies follows from
    its number and the row's by XOR, so few addresses serve all loads, with constants added.
    """

    def __init__(self, ref: ir.Value, by_k: bool, dtype, first: ir.Value, lane, *, is_b: bool):
        self._by_k, self._size = by_k, dtype.itemsize
        _, _, _, self._tile = ir.MemRefType(ref.type).shape
        strides, _ = ir.MemRefType(ref.type).get_strides_and_offset()
        self._strides = [stride * self._size for stride in strides[:2]]  # of rows and of columns
        row_bytes = self._tile * self._size
        row = arith.andi(lane, const(7))
        # The lanes from 8 on and from 16 on address other chunks, or other rows.
        second, third = (arith.andi(arith.shrui(lane, const(bit)), const(1)) for bit in (3, 4))
        # As of A, the second quarter of lanes has other rows of the result, the third another K.
        of_k, of_first = (second, third) if is_b else (third, second)
        by_row, by_chunk = (of_first, of_k) if by_k else (of_k, of_first)
        self._swizzle = arith.xori(
            arith.shrui(row, const({128: 0, 64: 1, 32: 2}[row_bytes])), by_chunk
        )
        place = arith.addi(
            arith.muli(row, const(row_bytes)), arith.muli(by_row, const(self._strides[0]))
        )
        if by_k:  # whole tiles of rows
            start = arith.muli(arith.shrui(first, const(3)), const(self._strides[0]))
        else:  # tiles of columns, and chunks of these
            tiles = arith.divui(first, const(self._tile))
            start = arith.muli(tiles, const(self._strides[1]))
            chunks = arith.divui(arith.remui(first, const(self._tile)), const(8))
            self._swizzle = arith.xori(self._swizzle, chunks)
        self._base = arith.addi(simt.smem_address(ref), arith.addi(place, start))
        self._addresses: dict[int, ir.Value] = {}

    def load(self, place: int, k_bytes: int, tiles: int = 4) -> list[ir.Value]:
        """16 rows or columns of the result, from this one of the warp's on, and 32 bytes of K; of
        B the first 8 columns alone if there are two `tiles`, not four."""
        row, column = (place, k_bytes // self._size) if self._by_k else (k_bytes // 2, place)
        tile, column = divmod(column, self._tile)
        chunk = column * self._size // _CHUNK
        if chunk not in self._addresses:
            swizzled = arith.muli(arith.xori(self._swizzle, const(chunk)), const(_CHUNK))
            self._addresses[chunk] = arith.addi(self._base, swizzled)
        offset = row // 8 * self._strides[0] + tile * self._strides[1]
        transposed = "" if self._by_k else ".trans"
        results = ", ".join(f"${i}" for i in range(tiles))
        return list(
            mgpu.utils.inline_ptx(
                f"ldmatrix.sync.aligned.m8n8.x{tiles}{transposed}.shared.b16 "
                f"{{{results}}}, [${tiles} + {offset}];",
                self._addresses[chunk],
                result_types=[ir.IntegerType.get_signless(32)] * tiles,
                has_side_effects=True,
                convergent=True,
            )
        )


def _mma(dtype, sums: list[ir.Value], a: list[ir.Value], b: list[ir.Value]) -> list[ir.Value]:
    depth, kind = _KINDS[dtype.name]
    return list(
        mgpu.utils.inline_ptx(
            f"mma.sync.aligned.m16n8{depth}.row.col.f32.{kind}.{kind}.f32 "
            "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
            *a,
            *b,
            *sums,
            result_types=[ir.F32Type.get()] * 4,
            convergent=True,
        )
    )


def _from_partner(given: list[ir.Value], scratch: ir.Value, room: int) -> list[ir.Value]:
    """What the lane of the warp beside this one has given; `room` chunks of a lane fit at once."""
    thread = simt.thread()
    mine, other = (
        arith.addi(scratch, arith.muli(lane, const(_CHUNK)))
        for lane in (thread, arith.xori(thread, const(32)))
    )
    f32, got = ir.F32Type.get(), []
    pairs = [given[i : i + 2] for i in range(0, len(given), 2)]
    for start in range(0, len(pairs), room):
        part = pairs[start : start + room]
        mgpu.warpgroup_barrier()  # what was in the scratch has been read
        for i, pair in enumerate(part):
            numbers = [vector.extract(a, [], [j]) for a in pair for j in range(2)]
            mgpu.utils.inline_ptx(
                f"st.shared.v4.f32 [$0 + {i * _CHUNK * _LANES}], {{$1, $2, $3, $4}};",
                mine,
                *numbers,
            )
        mgpu.warpgroup_barrier()
        for i in range(len(part)):
            numbers = mgpu.utils.inline_ptx(
                f"ld.shared.v4.f32 {{$0, $1, $2, $3}}, [$4 + {i * _CHUNK * _LANES}];",
                other,
                result_types=[f32] * 4,
                has_side_effects=True,
            )
            got += _pairs(list(numbers))
    return got


def _pairs(numbers: list[ir.Value]) -> list[ir.Value]:
    pair = ir.VectorType.get((2,), ir.F32Type.get())
    return [vector.from_elements(pair, numbers[i : i + 2]) for i in range(0, len(numbers), 2)]


def _array(numbers: list[ir.Value], like: mgpu.FragmentedArray) -> mgpu.FragmentedArray:
    return _like(like, _pairs(numbers))


def _like(array: mgpu.FragmentedArray, registers: list[ir.Value]) -> mgpu.FragmentedArray:
    shaped = np.array(registers, dtype=object).reshape(array.registers.shape)
    return mgpu.FragmentedArray(_registers=shaped, _layout=array.layout, _is_signed=None)

"""Matrices of 16-bit floats, transposed.

A warp has 64 rows and 32 columns. A lane reads eight rows of eight columns and writes eight columns
of eight rows, 16 bytes at a time, so all bytes that memory moves are needed.
"""

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import params, simt
from pallas_kernels.hopper.common.lanes import ptx
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.weights import DTYPES

UNIT = 8  # rows and columns of a lane
_ROWS, _COLUMNS = 64, 128  # of a thread block


def transposed(matrix: jax.Array) -> jax.Array:
    """The transpose of `[M, N]`, bfloat16 or float16, M and N multiples of 8, less than 2^31 bytes.

    Raises:
      ValueError: it is something else.
    """
    m, n = matrix.shape if matrix.ndim == 2 else (0, 0)
    if matrix.dtype not in DTYPES or not m * n or m % UNIT or n % UNIT or 2 * m * n >= 2**31:
        raise ValueError(
            "the matrix must be bfloat16 or float16 [M, N] of multiples of 8, less than 2^31 "
            f"bytes, got {matrix.dtype} {list(matrix.shape)}"
        )
    kernel = plgpu.kernel(
        _kernel,
        out_type=jax.ShapeDtypeStruct((n, m), matrix.dtype),
        grid=(pl.cdiv(m, _ROWS) * pl.cdiv(n, _COLUMNS),),
        grid_names=("block",),
        kernel_name="transposed",
        compiler_params=params.UNORDERED,
    )
    return kernel(matrix)


def _kernel(source, target):
    number, across = lax.axis_index("block"), pl.cdiv(source.shape[1], _COLUMNS)
    _transpose(source, target, lax.div(number, across), lax.rem(number, across))


@primitive
def _transpose(source_ref, target_ref, rows: jax.Array, columns: jax.Array) -> None:
    """Transposes a part; `rows` and `columns` are the block's, int32 scalars.

    Args:
      source_ref, target_ref: GMEM `[M, N]` and `[N, M]`.
    """
    m, n = source_ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def step(_, source, target, rows, columns):
        lane, warp = simt.lane_and_warp()
        row = _first(rows, _ROWS, arith.shrui(lane, const(2)))
        column = arith.addi(arith.muli(warp, const(4)), arith.andi(lane, const(3)))
        column = _first(columns, _COLUMNS, column)
        active = arith.andi(simt.less(row, const(m)), simt.less(column, const(n)))
        begin, stride = simt.element_address(source, row, column, 2)
        words = [simt.load_words(begin, stride * i, active, 4) for i in range(UNIT)]
        begin, stride = simt.element_address(target, column, row, 2)
        for i in range(UNIT):
            halves = "0x7632" if i % 2 else "0x5410"
            of_column = [
                ptx(f"prmt.b32 $0, $1, $2, {halves};", upper[i // 2], lower[i // 2])
                for upper, lower in zip(words[::2], words[1::2], strict=True)
            ]
            simt.store_chunk(begin, stride * i, of_column, active)

    step(source_ref, target_ref, rows, columns)


@_transpose.in_jax
def _transpose_in_jax(source_ref, target_ref, rows, columns):
    @pl.when(rows + columns == 0)  # all at once
    def _():
        target_ref[...] = source_ref[...].T


def _first(block, size: int, unit: ir.Value) -> ir.Value:
    """The first row or column of a lane."""
    number = block.registers.item()
    return arith.addi(arith.muli(number, const(size)), arith.muli(unit, const(UNIT)))

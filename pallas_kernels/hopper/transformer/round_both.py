"""Tokens or their gradients in 8 bits, by rows and by columns, rotated back on the way.

Products with 8-bit operands on Hopper want both operands along the sum: those of tokens sum over
columns, gradients of weights over tokens. XLA rounds, and then transposes bytes.

A warp rounds 64 tokens times 64 columns, of which a lane has 16 tokens and twice four columns: two
features that were rotated together are in one lane. Bytes of a column's tokens become words as
numbers are rounded in pairs; those of a row follow by permutations of bytes.
"""

from collections.abc import Sequence
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from pallas_kernels.hopper.common import eight_bits, params, simt, support
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.weights import DTYPES

TILE = 64  # tokens and columns of a warp
_WARPS = 4
_TOKENS, _COLUMNS = 16, 4  # of a lane, the columns twice
_HALF = TILE // 2
# The formats by the instruction that rounds to them.
_FORMATS = {jnp.dtype(jnp.float8_e4m3fn): "e4m3x2", jnp.dtype(jnp.float8_e5m2): "e5m2x2"}


def round_both(
    parts: tuple[jax.Array, ...],
    inverse: jax.Array,
    dtype: DTypeLike,
    angles: tuple[jax.Array, jax.Array] | None = None,
    rotated: int = 0,
) -> tuple[jax.Array, jax.Array]:
    """Arrays side by side, times `inverse`, in 8 bits; with their transpose.

    Args:
      parts: each `[M, N]`, bfloat16 or float16, M and N multiples of 64, M times all columns less
        than 2^32.
      inverse: float32 `[]`, by which no finite element exceeds what `dtype` holds. What is not
        finite becomes NaN.
      dtype: float8_e4m3fn or float8_e5m2.
      angles: cosines and sines, float32 `[T, n / 2]`, T a multiple of 64 that divides M, n a
        multiple of 64: those of token t are in row t mod T. None: nothing was rotated.
      rotated: so many parts, the first ones, are gradients of what `angles` rotated, in heads of n
        columns: features i and i + n / 2 by an angle. They are rotated back.

    Returns:
      `[M, all N]` and `[all N, M]` in `dtype`.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    if jnp.dtype(dtype) not in _FORMATS:
        raise ValueError(f"dtype must be float8_e4m3fn or float8_e5m2, got {jnp.dtype(dtype)}")
    m, widths = _checked(parts, angles, rotated)
    columns = sum(widths)
    kernel = plgpu.kernel(
        partial(_kernel, rotated=rotated),
        out_type=(
            jax.ShapeDtypeStruct((m, columns), dtype),
            jax.ShapeDtypeStruct((columns, m), dtype),
        ),
        grid=(m // TILE, len(parts)),
        grid_names=("tile", "part"),
        kernel_name="round_both",
        compiler_params=params.UNORDERED,
    )
    return kernel(parts, inverse.reshape(1), angles)


def _checked(parts, angles, rotated) -> tuple[int, list[int]]:
    first = parts[0]
    if first.ndim != 2 or first.dtype not in DTYPES or not len(first) or len(first) % TILE:
        raise ValueError(
            "parts must be bfloat16 or float16 [M, N], M a multiple of 64, got "
            f"{first.dtype} {list(first.shape)}"
        )
    m, widths = len(first), [part.shape[-1] for part in parts]
    if m * sum(widths) >= 2**32:
        raise ValueError(f"parts must have less than 2^32 elements, got {m} x {sum(widths)}")
    size = 0
    if angles is not None:
        cos, sin = angles
        length, size = cos.shape[0], 2 * cos.shape[1]
        if length % TILE or m % length or not size or size % TILE:
            raise ValueError(
                "angles must be [T, n / 2], T a multiple of 64 that divides M, n a multiple of 64, "
                f"got {list(cos.shape)} for M = {m}"
            )
        for name, table in (("cosines", cos), ("sines", sin)):
            support.check_array(name, table, (length, size // 2), jnp.float32)
    elif rotated:
        raise ValueError(f"rotated is {rotated}, but there are no angles; give them")
    for i, (part, width) in enumerate(zip(parts, widths, strict=True)):
        support.check_array(f"parts[{i}]", part, (m, width), first.dtype)
        unit = size if i < rotated else TILE
        if not width or width % unit:
            raise ValueError(f"parts[{i}] must have a multiple of {unit} columns, got {width}")
    return m, widths


def _kernel(parts, inverse, angles, values, transposed, *, rotated):
    first = lax.axis_index("tile") * TILE
    rows, scale = pl.ds(first, TILE), inverse[0]
    widths = [part.shape[1] for part in parts]
    starts = [0, *accumulate(widths)][:-1]
    for i, (part, start, width) in enumerate(zip(parts, starts, widths, strict=True)):
        tables, columns = None, pl.ds(start, width)
        if i < rotated:
            angle_rows = pl.ds(lax.rem(first, angles[0].shape[0]), TILE)
            tables = tuple(table.at[angle_rows] for table in angles)

        refs = part.at[rows], values.at[rows, columns], transposed.at[columns, rows], tables

        @pl.when(lax.axis_index("part") == i)
        def _(refs=refs, width=width):
            @pl.loop(0, pl.cdiv(width // TILE, _WARPS))
            def _(group):
                _round_columns(*refs, scale, group)


class _Share(NamedTuple):
    """A lane's share of 64 tokens and 64 columns, inside `plgpu.inline_mgpu`.

    Attributes:
      token, column, angle: the first of them, i32; the angle is that of the column.
      halves: offsets of its columns, four each from `column` on.
      active: whether there are such columns, i1.
    """

    token: ir.Value
    column: ir.Value
    angle: ir.Value
    halves: tuple[int, int]
    active: ir.Value


@primitive
def _round_columns(part_ref, values_ref, transposed_ref, angles, inverse, group) -> None:
    """Each warp rounds 64 columns: `4 group` plus its number says which.

    Args:
      part_ref: GMEM `[64, N]`, 16-bit.
      values_ref, transposed_ref: GMEM, 8-bit `[64, N]` and `[N, 64]`, parts of larger arrays.
      angles: cosines and sines of these tokens, GMEM `[64, n / 2]`, float32; or None.
      inverse: float32 scalar.
      group: int32 scalar.
    """
    dtype, width = jnp.dtype(part_ref.dtype), part_ref.shape[1]
    rounded = _FORMATS[jnp.dtype(values_ref.dtype)]
    size = TILE if angles is None else 2 * angles[0].shape[1]
    refs = [part_ref, values_ref, transposed_ref, *(angles or ())]

    @plgpu.inline_mgpu(arg_types=(*[plgpu.RefType()] * len(refs), SCALAR, SCALAR))
    def step(_, part, values, transposed, *operands):
        *tables, inverse, group = operands
        share = _share(group.registers.item(), width, size)
        words = _loaded(part, share)
        places = [simt.element_address(table, share.token, share.angle, 4) for table in tables]
        target, stride = simt.element_address(values, share.token, share.column, 1)
        by_columns = []  # of each four tokens, the eight columns
        for first in range(0, _TOKENS, 4):
            rows = [
                _numbers(words[row], _angles(places, row, share.active), inverse, dtype)
                for row in range(first, first + 4)
            ]
            packed = [_packed(rounded, column) for column in zip(*rows, strict=True)]
            by_columns.append(packed)
            for half, columns in zip(share.halves, (packed[:4], packed[4:]), strict=True):
                for row, word in enumerate(_by_rows(columns), first):
                    simt.store_chunk(target, row * stride + half, [word], share.active)
        for c, tokens in enumerate(zip(*by_columns, strict=True)):
            offset = share.halves[c // _COLUMNS] + c % _COLUMNS
            row = arith.addi(share.column, const(offset))
            simt.store_chunk(
                simt.element_address(transposed, row, share.token, 1)[0],
                0,
                list(tokens),
                share.active,
            )

    step(*refs, inverse, group)


def _share(group: ir.Value, width: int, size: int) -> _Share:
    """That of this lane, of an array of so many columns in heads of `size` columns."""
    lane, warp = simt.lane_and_warp()
    unit = arith.addi(arith.muli(group, const(_WARPS)), warp)
    # A unit is 32 columns of the first half of a head, and those of the second half with them.
    head, piece = (op(unit, const(size // TILE)) for op in (arith.divui, arith.remui))
    column = arith.muli(arith.andi(lane, const(7)), const(_COLUMNS))
    angle = arith.addi(arith.muli(piece, const(_HALF)), column)
    return _Share(
        token=arith.muli(arith.shrui(lane, const(3)), const(_TOKENS)),
        column=arith.addi(arith.muli(head, const(size)), angle),
        angle=angle,
        halves=(0, size // 2),
        active=simt.less(unit, const(width // TILE)),
    )


def _loaded(part: ir.Value, share: _Share) -> list[list[list[ir.Value]]]:
    """For each token the words of both halves."""
    source, stride = simt.element_address(part, share.token, share.column, 2)
    return [
        [simt.load_words(source, row * stride + 2 * half, share.active, 2) for half in share.halves]
        for row in range(_TOKENS)
    ]


def _angles(places, row: int, active: ir.Value) -> list[list[ir.Value]]:
    """Cosines and sines of a lane's four angles of a token; nothing without tables."""
    return [
        [
            mgpu.utils.bitcast(word, ir.F32Type.get())
            for word in simt.load_words(place, row * stride, active)
        ]
        for place, stride in places
    ]


def _numbers(words, angles, inverse: mgpu.FragmentedArray, dtype: jnp.dtype) -> list[ir.Value]:
    """A lane's eight numbers of a token, rotated back and times `inverse`."""
    first, second = (
        [n for word in half for n in eight_bits.widened(word, dtype)] for half in words
    )
    if angles:
        first, second = _rotated_back(first, second, *angles)
    return [_scaled(number, inverse.registers.item()) for number in (*first, *second)]


@_round_columns.in_jax
def _round_columns_in_jax(part_ref, values_ref, transposed_ref, angles, inverse, group):
    x = part_ref[...].astype(jnp.float32)
    if angles is not None:
        cos, sin = (table[...] for table in angles)
        heads = x.reshape(TILE, -1, 2, cos.shape[1])
        first, second = heads[:, :, 0], heads[:, :, 1]
        cos, sin = cos[:, None], sin[:, None]
        x = jnp.stack([first * cos + second * sin, second * cos - first * sin], axis=2)
        x = x.reshape(TILE, -1)

    @pl.when(group == 0)  # all columns at once
    def _():
        values = (x * inverse).astype(values_ref.dtype)
        values_ref[...] = values
        transposed_ref[...] = values.T


def _rotated_back(first, second, cos, sin):
    """The features of the two halves, rotated by the negative angles."""
    back = [
        (
            arith.addf(arith.mulf(a, c), arith.mulf(b, s)),
            arith.subf(arith.mulf(b, c), arith.mulf(a, s)),
        )
        for a, b, c, s in zip(first, second, cos, sin, strict=True)
    ]
    return [a for a, _ in back], [b for _, b in back]


def _scaled(number: ir.Value, inverse: ir.Value) -> ir.Value:
    """The product; NaN if it is not finite, of which rounding would make the largest number."""
    return mgpu.utils.inline_ptx(
        "mul.rn.f32 $0, $1, $2; fma.rn.f32 $0, $0, 0f00000000, $0;",
        number,
        inverse,
        result_types=ir.F32Type.get(),
    )


def _packed(rounded: str, numbers: Sequence[ir.Value]) -> ir.Value:
    """Four float32 in the bytes of a word."""
    return _word(
        f"""{{.reg .b16 low, high;
            cvt.rn.satfinite.{rounded}.f32 low, $2, $1;
            cvt.rn.satfinite.{rounded}.f32 high, $4, $3;
            mov.b32 $0, {{low, high}};}}""",
        *numbers,
    )


def _by_rows(columns: list[ir.Value]) -> list[ir.Value]:
    """Of four words, their first bytes, their second, third and fourth."""

    def permuted(a, b, order):
        return _word(f"prmt.b32 $0, $1, $2, {order};", a, b)

    (a, b, c, d), rows = columns, []
    for halves in ("0x5140", "0x7362"):
        left, right = permuted(a, b, halves), permuted(c, d, halves)
        rows += [permuted(left, right, order) for order in ("0x5410", "0x7632")]
    return rows


def _word(code: str, *operands: ir.Value) -> ir.Value:
    return mgpu.utils.inline_ptx(code, *operands, result_types=const(0).type)

"""One token's feed-forward block by the rows behind its active gates.

The thread blocks of a cluster share the gates out. Each lists its share, walks their rows of w_up
and w_down (`register_rows.gather_ffn`), and sends the others its sums of their columns.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import register_rows, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.decode import cluster, rounding, shares, token_columns
from pallas_kernels.rectifiers import Rectifier

_LANES = 128  # of a thread block
_ROW_LOADS = 8  # 16-byte loads from each matrix that a lane keeps in flight, or one row's


class Share(NamedTuple):
    """The columns of a token's result that a thread block finishes.

    Attributes:
      number: int32 scalar, the block's rank in the cluster.
      blocks: thread blocks of the cluster.
      size: number of columns.
      sums: SMEM, workspace of the function `scratch`.
    """

    number: jax.Array
    blocks: int
    size: int
    sums: Any

    @classmethod
    def of(cls, number: jax.Array, blocks: int, d: int, scratch) -> "Share":
        """The `number`-th share of D columns, which count as `register_rows.row_width(d)`."""
        return cls(number, blocks, register_rows.row_width(d) // blocks, scratch["sums"])

    @property
    def columns(self) -> Any:
        """Which columns these are."""
        return pl.ds(self.number * self.size, self.size)

    def total(self, values: jax.Array) -> jax.Array:
        """The sum of float32 values of these columns, in the layout of `wide`; behind `sum_rows`.

        For `jnp.sum` the compiler would set aside 2 KB of shared memory that `Cut` does not know.
        """
        (total,) = register_rows.sum_rows([values], self.sums.at[0], _layout(self.size))
        return total

    def store_total(self, sums_ref, total) -> None:
        """Stores `total`, a scalar of these columns, where `sums_ref: [parts]` has room for it."""
        token_columns.store_total(sums_ref, self.number, self.blocks, total)


def scratch(d: int) -> dict[str, Any]:
    """Shared memory for `shares.find` and for sums of products."""
    return dict(
        counts=plgpu.SMEM((2, 4), jnp.int32), sums=plgpu.SMEM((2, _rows_at_once(d), 4), jnp.float32)
    )


def memory(h: int, d: int, blocks: int) -> dict[str, Any]:
    """Shared memory for the active gates of a block's share, and for what arrives of all blocks."""
    return dict(
        entries=plgpu.SMEM((h // blocks + 2 * _rows_at_once(d),), jnp.uint32),
        y_parts=plgpu.SMEM((blocks, register_rows.row_width(d) // blocks), jnp.float32),
        l1_parts=plgpu.SMEM((blocks,), jnp.float32),
    )


def _rows_at_once(d):
    return max(1, _ROW_LOADS // register_rows.row_steps(d))


def load_x(x_ref, squares_ref, active, scratch, *, is_8_bits: bool, eps: float) -> jax.Array:
    """The normed x of a token, a float32 row.

    Args:
      x_ref: GMEM `[D]`.
      squares_ref: that of the token in `Stream.squares`; None if x is not to be normed.
      active: if it is False, x is zero.
      scratch: of the function of this name.
      is_8_bits: whether x is rounded to 8-bit floats before it is normed.
      eps: of the norm.
    """
    row = register_rows.load_row(x_ref, active)
    row = (
        rounding.round_row(row, scratch["sums"].at[0, 0]) if is_8_bits else register_rows.widen(row)
    )
    if squares_ref is None:
        return row
    return row * token_columns.inverse_rms_of_one(squares_ref, x_ref.shape[0], eps)


def sum_rows(
    x_row, gate_ref, found: shares.Found, share: Share, w_up, up_scale, w_down,
    scratch, memory, arrived, rectifier: Rectifier,
) -> tuple[jax.Array, jax.Array]:  # fmt: skip
    """A token's result; all blocks of the cluster call it.

    Args:
      x_row: from `load_x`; None without a gate projection.
      gate_ref: GMEM `[H]`.
      found: of `shares.find`, its active gates.
      share: this block's.
      w_up, up_scale, w_down, rectifier: as of `register_rows.gather_ffn`.
      scratch, memory: of the functions of these names.
      arrived: of `cluster.prepare`.

    Returns:
      y of the share's columns, float32 in the layout of `wide`, and the float32 scalar sum of |h|.
    """
    entries, y_parts, l1_parts = (memory[name] for name in ("entries", "y_parts", "l1_parts"))
    cluster.expect(4 * (y_parts.size + l1_parts.size), arrived)
    shares.list_share(found, gate_ref, share.number, share.blocks, entries)
    count = (found.total + share.blocks - 1 - share.number) // share.blocks
    y, l1 = register_rows.gather_ffn(
        x_row, entries, count, w_up, w_down, scratch["sums"], rectifier, up_scale
    )
    cluster.send_parts(y, l1, share.number, y_parts, l1_parts, arrived)
    cluster.wait_for_parts(arrived)
    y = functools.reduce(jnp.add, [wide(y_parts.at[b]) for b in range(share.blocks)])
    return y, functools.reduce(jnp.add, [l1_parts[b] for b in range(share.blocks)])


@primitive
def wide(ref) -> jax.Array:
    """`ref: [n]` in float32, two neighbours in each register if no lane has fewer."""
    return plgpu.load(ref, layout=_layout(ref.shape[0])).astype(jnp.float32)


@primitive
def load_now(ref) -> jax.Array:
    """As `wide`, of 16 bits in GMEM; the loads stand here, not where the values are first used."""
    (n,) = ref.shape
    result = plgpu.ShapeDtypeStruct((n,), jnp.float32, layout=_layout(n))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, ref):
        neighbours = _neighbours(n)
        bits = ir.IntegerType.get_signless(16 * neighbours)
        narrow, wide = (
            ir.VectorType.get((neighbours,), dtype)
            for dtype in (ir.MemRefType(ref.type).element_type, ir.F32Type.get())
        )
        lane = arith.andi(mgpu.thread_idx(), simt.const(_LANES - 1))
        address = simt.gmem_address(ref, arith.muli(lane, simt.const(2 * neighbours)))
        registers = []
        for start in range(0, n, _LANES * neighbours):
            loaded = mgpu.utils.inline_ptx(
                f"ld.global.b{bits.width} $0, [$1 + {2 * start}];",
                address,
                result_types=bits,
                has_side_effects=True,
            )
            registers.append(arith.extf(wide, mgpu.utils.bitcast(loaded, narrow)))
        return mgpu.FragmentedArray(
            _registers=np.array(registers, dtype=object),
            _layout=_layout(n).to_mgpu(),
            _is_signed=None,
        )

    return step(ref)


@wide.in_jax
@load_now.in_jax
def _wide(ref):
    return ref[...].astype(jnp.float32)


def _layout(n: int):
    return plgpu.Layout.WG_STRIDED((n,), vec_size=_neighbours(n))


def _neighbours(n: int) -> int:
    return 2 if n % (2 * _LANES) == 0 else 1

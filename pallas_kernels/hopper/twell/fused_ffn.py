"""Up and down projection behind a TwELL-packed gate, fused (arXiv 2603.23198).

One warpgroup takes one token: it collects the row's entries from its tiles into shared memory and
walks that list (`register_rows.gather_ffn`), so that the hidden activation h lives in registers
alone. A thread block holds a few neighbouring tokens, which share neurons; thread blocks are short,
so the hardware's own scheduler balances rows of different lengths. Heavy rows (`twell.is_heavy`)
are put on a list for `dense_rows`, which may start as soon as all thread blocks have looked at
their rows.

Weights may be slices of stacked weights: nothing is changed in place, so XLA copies none of them.
"""

import dataclasses
import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from pallas_kernels import quantised
from pallas_kernels.hopper.common import lists, params, register_rows, scalars, simt, support
from pallas_kernels.hopper.common.dependent_launch import launch_next
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.layouts import twell
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.quantised import Operand, Tokens
from pallas_kernels.rectifiers import RELU, Rectifier


@dataclasses.dataclass(frozen=True)
class FusedFFNConfig:
    """Schedule of `fused_ffn` on Hopper.

    Attributes:
      loads: 16-byte loads from each weight matrix that a lane keeps in flight, or one row's worth
        where that is more.
      rows: rows of a thread block, at most; wide rows need more registers, so that fewer fit.
    """

    loads: int = 4
    rows: int = 6


_TUNED = {  # (D, H) of common shapes where another schedule was faster: benchmarks/tune.py
    (1024, 5632): FusedFFNConfig(loads=8, rows=4),
    (4096, 11008): FusedFFNConfig(loads=8, rows=4),
}


class _Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
      counters: int32 `[3]`, of `lists.finish`, which sets them to 0 again.
      x: `[M, D]`, or the `Tokens`.
      packed: uint32 `[M, ceil(H / 256), 32]`.
      x_up: `[M, D]`, what w_up is multiplied with; None in the non-gated form.
      w_up: `[H, D]`, likewise.
      scales: those of the rows of x_up and of w_up; None if these are not in 8 bits.
      w_down: `[H, D]`.
    """

    counters: Any
    x: Any
    packed: Any
    x_up: Any
    w_up: Any
    scales: Any
    w_down: Any


class _Results(NamedTuple):
    """What the kernel writes, as `fused_ffn` returns it."""

    y: Any
    nnz: Any
    l1: Any
    heavy: HeavyRows


def fused_ffn(
    x: jax.Array | Tokens,
    packed: jax.Array,
    w_up: Operand | None,
    w_down: jax.Array,
    rectifier: Rectifier = RELU,
    *,
    config: FusedFFNConfig | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array, HeavyRows]:
    """Computes `y[m] = sum_n h[m, n] w_down[n]` over the entries (n, g) of row m of `packed`.

    h[m, n] = g (x[m] . w_up[n]), or g in the non-gated form. Sums are float32, in a fixed order for
    a fixed order of the entries; y is rounded once. Weights of neurons without an entry are not
    read. Where x[m] is not finite, neither is any up projection, and its product with a gate of
    zero makes the gated y and l1 NaN. Heavy rows, which lack entries in `packed` or have more than
    128, are listed, not computed.

    Args:
      x: `[M, D]`, bfloat16 or float16, M >= 1, D a multiple of 64 from 128 to 8192; or `Tokens`, if
        a weight is `Quantised`.
      packed: uint32 `[M, ceil(H / 256), 32]`, the gate in TwELL (see `twell`), values in the dtype
        of the weights.
      w_up: `[H, D]`, H a multiple of 128 up to 65536; if it is `Quantised`, with a scale for each
        row, D is a multiple of 128. None in the non-gated form.
      w_down: `[H, D]`.
      rectifier: what made the gate; it may pass `x[m] . w_up[n]` through a ReLU.
      config: schedule; None for the one that suits D and H.

    Returns:
      y: `[M, D]` in the dtype of the weights; 0 in heavy rows.
      nnz: int32 `[M]`, the row's number of non-zeros.
      l1: float32 `[M]`, `sum_n |h[m, n]|`; 0 in heavy rows.
      heavy: the heavy rows, rows `[M]`.

    Raises:
      ValueError: if a shape or dtype is not as above.
    """
    support.check_weight("w_down", w_down)
    if not packed.shape or packed.shape[0] < 1:
        raise ValueError(f"packed must have at least one row, got {list(packed.shape)}")
    m, (h, d) = packed.shape[0], w_down.shape
    _, tiles, words = shape = twell.packed_shape(m, h)
    support.check_array("packed", packed, shape, jnp.uint32)
    exact = x.exact if isinstance(x, Tokens) else x
    support.check_array("x", exact, (m, d), w_down.dtype)
    x_up = up = scales = None
    if w_up is not None:
        x_up = quantised.for_product(x, w_up)
        support.check_operand("w_up", w_up, (h, d), w_down if x_up is exact else x_up)
        x_up, up, scales = quantised.unscaled(x_up, w_up)

    config = config or _TUNED.get((d, h), FusedFFNConfig())
    steps = register_rows.row_steps(d)
    batch = max(1, config.loads // steps)
    rows = min(config.rows, 16 // steps)
    kernel = plgpu.kernel(
        functools.partial(_kernel, rectifier),
        out_type=[_result_types(x, w_down)],
        scratch_types=dict(
            looked=plgpu.Barrier(num_arrivals=rows),
            entries=plgpu.SMEM((rows, tiles * (words - 1) + 2 * batch), jnp.uint32),
            sums=plgpu.SMEM((rows, 3, batch, 4), jnp.float32),
        ),
        grid=(pl.cdiv(m, rows),),
        grid_names=("block",),
        num_threads=rows,
        thread_name="warpgroup",
        kernel_name="fused_ffn",
        compiler_params=params.UNORDERED,
    )
    # To XLA the counters are a constant; see `gathered_matmul`. A number besides zeros keeps
    # XLA from filling them in for each call, by a kernel.
    counters = jnp.array([0, 0, 1], jnp.int32)
    ((*out, heavy),) = kernel(_Operands(counters, x, packed, x_up, up, scales, w_down))
    return *out, dataclasses.replace(heavy, pending=(*jax.tree.leaves(x), *out))


def _result_types(x, w_down):
    (m, _), *_ = (a.shape for a in jax.tree.leaves(x))
    padded_m = pl.cdiv(m, 8) * 8
    return _Results(
        y=jax.ShapeDtypeStruct((m, w_down.shape[1]), w_down.dtype),
        nnz=jax.ShapeDtypeStruct((m,), jnp.int32),
        l1=jax.ShapeDtypeStruct((m,), jnp.float32),
        heavy=HeavyRows(
            count=jax.ShapeDtypeStruct((1,), jnp.int32),
            rows=jax.ShapeDtypeStruct((m,), jnp.int32),
            x=jax.tree.map(lambda a: jax.ShapeDtypeStruct((padded_m, a.shape[1]), a.dtype), x),
        ),
    )


def _kernel(rectifier, operands, results, *, looked, entries, sums):
    is_gated, scales = operands.w_up is not None, operands.scales
    warpgroup = lax.axis_index("warpgroup")
    row = lax.axis_index("block") * entries.shape[0] + warpgroup
    is_row = row < operands.packed.shape[0]

    pl.when(~is_row)(lambda: plgpu.barrier_arrive(looked))

    @pl.when(is_row)
    def _():
        mine, my_sums = entries.at[warpgroup], sums.at[warpgroup]
        x_row = register_rows.load_row(operands.x_up.at[row], jnp.bool(True)) if is_gated else None
        count = _collect_entries(operands.packed.at[row], mine)

        @pl.when(count < 0)
        def _():
            place = lists.append(operands.counters.at[pl.ds(0, 1)], jnp.int32(1), my_sums)
            results.heavy.rows[place] = row
            register_rows.copy_token(operands.x, row, results.heavy.x, place)

        plgpu.barrier_arrive(looked)

        @pl.when(warpgroup == 0)
        def _():
            plgpu.barrier_wait(looked)
            lists.finish(operands.counters, results.heavy.count, lax.axis_size("block"))
            launch_next()

        wide = register_rows.widen(x_row) if is_gated else None
        up_scale = None
        if scales is not None:
            x_scale, up_scale = scales
            wide *= x_scale[row]
        y_row, row_l1 = register_rows.gather_ffn(
            wide,
            mine,
            jnp.maximum(count, 0),
            operands.w_up,
            operands.w_down,
            my_sums,
            rectifier,
            up_scale,
        )
        if is_gated:
            # A slower warp may still read the sums of the last batch, in one of the other two.
            poison = jnp.where(
                (count < 0) | register_rows.all_finite(wide, my_sums.at[2]), 0.0, jnp.nan
            )
            y_row, row_l1 = y_row + poison, row_l1 + poison
        register_rows.store_row(results.y.at[row], y_row.astype(results.y.dtype))
        results.nnz[row] = jnp.maximum(count, ~count)
        results.l1[row] = row_l1


@primitive
def _collect_entries(packed_ref, entries_ref) -> jax.Array:
    """Copies the entries of one row of TwELL to the front of a list.

    Args:
      packed_ref: GMEM, uint32 `[tiles, W]`.
      entries_ref: SMEM, uint32, at least `tiles * (W - 1)`.

    Returns:
      int32 scalar, the number of entries k, or ~k if the row is heavy.
    """
    tiles, words = packed_ref.shape

    @plgpu.inline_mgpu(arg_types=2 * [plgpu.RefType()], return_type=scalars.INT32)
    def step(_, packed_ref, entries_ref):
        ptx, const, less = mgpu.utils.inline_ptx, simt.const, simt.less
        lane, warp = simt.lane_and_warp()
        # The warps share out every tile: each takes every fourth of its entries.
        warp_offset = arith.muli(warp, const(4))
        place = arith.addi(simt.smem_address(entries_ref), warp_offset)
        total = most = const(0)
        for first_tile in range(0, tiles, 32):  # one tile per lane
            tile = arith.addi(lane, const(first_tile))
            offset = arith.muli(tile, const(4 * words))
            address = simt.gmem_address(packed_ref, offset)
            (count,) = simt.load_words(address, 0, less(tile, const(tiles)), 1)
            stored = arith.minui(count, const(words - 1))
            end = simt.inclusive_sum(stored, lane)
            total = arith.addi(total, simt.warp_sum(count))
            most = arith.maxui(most, simt.warp_max(count))

            address = simt.gmem_address(packed_ref, arith.addi(offset, warp_offset))
            target = arith.addi(place, arith.muli(arith.subi(end, stored), const(4)))
            copies = []
            for rank in range(0, words, 4):
                is_held = less(arith.addi(warp, const(rank)), stored)
                (entry,) = simt.load_words(address, 4 * (1 + rank), is_held, 1)
                copies.append((rank, entry, is_held))
            for rank, entry, is_held in copies:
                ptx(f"st.shared.b32 [$0 + {4 * rank}], $1;", target, entry, predicate=is_held)
            in_tiles = simt.warp_sum(stored)
            place = arith.addi(place, arith.muli(in_tiles, const(4)))
        mgpu.warpgroup_barrier()
        complement = arith.xori(total, const(-1))
        is_heavy = arith.ori(
            less(const(words - 1), most), less(const(twell.MAX_ROW_ENTRIES), total)
        )
        total = arith.select(is_heavy, complement, total)
        return scalars.int32(total)

    return step(packed_ref, entries_ref)


@_collect_entries.in_jax
def _(packed_ref, entries_ref):
    tiles = packed_ref[...]
    counts, words = tiles[:, :1].astype(jnp.int32), tiles[:, 1:]
    stored = (jnp.arange(words.shape[1]) < counts).ravel()
    order = jnp.argsort(~stored, stable=True)
    entries_ref[: words.size] = words.ravel()[order]
    total = counts.sum()
    is_heavy = jnp.any(counts > words.shape[1]) | (total > twell.MAX_ROW_ENTRIES)
    return jnp.where(is_heavy, ~total, total)

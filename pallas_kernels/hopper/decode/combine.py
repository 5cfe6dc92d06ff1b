"""The end of `decode_attention`: thread blocks of a cluster exchange and add up their parts."""

import jax
import jax.numpy as jnp
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
from pallas_kernels.hopper.decode import on_host
from pallas_kernels.hopper.decode.attend import HEADS, Heads

_HEAD_SUMS = plgpu.Layout.WGMMA.reduce(0)  # two heads in each lane of a quad


@primitive
def send_parts(o, top, total, block, o_parts_ref, sums_ref, arrived_ref) -> None:
    """Sends each block of the cluster its rows of `o`, and `top` and `total`.

    As in `cluster.send_parts`: before it comes `cluster.expect` with the bytes of both references,
    after it `cluster.wait_for_parts`; but a block alone only stores its parts, and needs neither
    (they would be illegal instructions in a kernel without clusters).

    Args:
      o: float32 `[blocks * rows, 8]` in the WGMMA layout, rows a multiple of 8.
      top, total: float32 `[8]`, as a reduction over the rows of such an array leaves them.
      block: int32 scalar, this block's rank in the cluster.
      o_parts_ref: SMEM, float32 `[blocks, rows, 8]`.
      sums_ref: SMEM, float32 `[blocks, 2, 8]`; gets `top` and `total`.
      arrived_ref: of `cluster.prepare`.
    """

    @plgpu.inline_mgpu(
        arg_types=(
            plgpu.Layout.WGMMA, _HEAD_SUMS, _HEAD_SUMS, SCALAR, *(plgpu.RefType(),) * 3
        )
    )  # fmt: skip
    def step(_, o, top, total, block, o_parts_ref, sums_ref, arrived_ref):
        (block,) = block.registers.flat
        blocks, rows, _ = ir.MemRefType(o_parts_ref.type).shape
        lane, warp = simt.lane_and_warp()
        row_in_eight, pair = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        arrived = simt.smem_address(arrived_ref) if blocks > 1 else None
        if blocks > 1:  # all barriers are initialised
            mgpu.utils.inline_ptx("barrier.cluster.wait.aligned;", convergent=True)
        mine = arith.addi(
            simt.smem_address(o_parts_ref), arith.muli(block, const(4 * rows * HEADS))
        )
        mine = arith.addi(mine, arith.muli(pair, const(8)))
        for i, register in enumerate(o.registers.flat):
            tile, half = divmod(i, 2)
            row = arith.addi(arith.muli(warp, const(16)), const(64 * tile + 8 * half))
            row = arith.addi(row, row_in_eight)
            place = arith.muli(arith.remui(row, const(rows)), const(4 * HEADS))
            _send(arith.addi(mine, place), arith.divui(row, const(rows)), register, arrived)

        thread = arith.remui(mgpu.thread_idx(), const(128))
        mine = arith.addi(simt.smem_address(sums_ref), arith.muli(block, const(8 * HEADS)))
        mine = arith.addi(mine, arith.muli(pair, const(8)))
        is_sender = simt.less(thread, const(4 * blocks))  # each sends to block `thread / 4`
        receiver = arith.remui(arith.shrui(thread, const(2)), const(blocks))
        for i, sums in enumerate((top, total)):
            (register,) = sums.registers.flat
            _send(arith.addi(mine, const(4 * HEADS * i)), receiver, register, arrived, is_sender)
        if blocks == 1:
            mgpu.warpgroup_barrier()

    step(o, top, total, block, o_parts_ref, sums_ref, arrived_ref)


@send_parts.in_jax
def _send_parts(o, top, total, block, o_parts_ref, sums_ref, arrived_ref):
    del arrived_ref
    blocks, rows, _ = o_parts_ref.shape
    o_parts, tops, totals = on_host.of_all((o, top, total), block, blocks)
    o_parts_ref[...] = lax.dynamic_slice_in_dim(o_parts, block * rows, rows, axis=1)
    sums_ref[...] = jnp.stack([tops, totals], axis=1)


def _send(address, receiver, register, arrived, predicate=None) -> None:
    """Sends two numbers to the same place in another block; without `arrived` it stores them."""
    ptx, i32 = mgpu.utils.inline_ptx, const(0).type
    odd, even = lanes.elements(register)
    if arrived is None:
        ptx("st.shared.v2.f32 [$0], {$1, $2};", address, even, odd, predicate=predicate)
        return
    address, barrier = (
        ptx("mapa.shared::cluster.u32 $0, $1, $2;", a, receiver, result_types=i32)
        for a in (address, arrived)
    )
    ptx(
        "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [$0], {$1, $2}, [$3];",
        address,
        even,
        odd,
        barrier,
        predicate=predicate,
    )


@primitive
def store_combined(o_parts_ref, sums_ref, out_ref, head: jax.Array, *, heads: Heads, block) -> None:
    """Adds up the cluster's parts in a fixed order and stores this block's rows of the result.

    Args:
      o_parts_ref, sums_ref: as `send_parts` fills them; `top` is a power of two's exponent.
      out_ref: GMEM `[heads.all * heads.size]`, 16-bit.
      head: int32 scalar, the key/value head.
      heads: shape of the heads.
      block: int32 scalar, this block's rank in the cluster.
    """

    @plgpu.inline_mgpu(arg_types=(*(plgpu.RefType(),) * 3, SCALAR, SCALAR))
    def step(_, o_parts_ref, sums_ref, out_ref, head, block):
        (head,), (block,) = head.registers.flat, block.registers.flat
        _, rows, _ = ir.MemRefType(o_parts_ref.type).shape
        dtype = ir.MemRefType(out_ref.type).element_type
        thread = arith.remui(mgpu.thread_idx(), const(128))
        for start in range(0, HEADS * rows // 2, 128):  # two rows of a head each time
            number = arith.addi(thread, const(start))
            my_head, row = (op(number, const(rows // 2)) for op in (arith.divui, arith.remui))
            row = arith.muli(row, const(2))
            is_mine = simt.less(my_head, const(heads.group))
            safe_head = arith.andi(my_head, const(HEADS - 1))
            values = _combine(o_parts_ref, sums_ref, safe_head, row)
            pair = vector.from_elements(ir.VectorType.get((2,), ir.F32Type.get()), values)
            pair = arith.truncf(ir.VectorType.get((2,), dtype), pair)
            all_head = arith.addi(arith.muli(head, const(heads.group)), my_head)
            column = arith.addi(
                arith.muli(all_head, const(heads.size)),
                arith.addi(arith.muli(block, const(rows)), row),
            )
            mgpu.utils.inline_ptx(
                "st.global.b32 [$0], $1;",
                simt.gmem_address(out_ref, arith.muli(column, const(2))),
                mgpu.utils.bitcast(pair, const(0).type),
                predicate=is_mine,
            )

    step(o_parts_ref, sums_ref, out_ref, head, block)


@store_combined.in_jax
def _store_combined(o_parts_ref, sums_ref, out_ref, head, *, heads, block):
    top, total = sums_ref[:, 0], sums_ref[:, 1]
    weight = jnp.exp2(top - jnp.max(top, axis=0))
    sums = jnp.sum(weight[:, None] * o_parts_ref[...], axis=0) / jnp.sum(weight * total, axis=0)
    rows = len(sums)
    for i in range(heads.group):
        column = (head * heads.group + i) * heads.size + block * rows
        out_ref[pl.ds(column, rows)] = sums[:, i].astype(out_ref.dtype)


def _combine(o_parts_ref, sums_ref, head, row):
    """Two rows, from `row` on, of one head: the cluster's parts in relation to the largest top."""
    f32 = ir.F32Type.get()
    blocks, rows, _ = ir.MemRefType(o_parts_ref.type).shape
    column = arith.muli(head, const(4))
    sums = arith.addi(simt.smem_address(sums_ref), column)
    parts = arith.addi(simt.smem_address(o_parts_ref), column)
    parts = arith.addi(parts, arith.muli(row, const(4 * HEADS)))

    def load(address, offset):
        return mgpu.utils.inline_ptx(
            f"ld.shared.f32 $0, [$1 + {4 * offset}];",
            address,
            result_types=f32,
            has_side_effects=True,
        )

    tops = [load(sums, 2 * HEADS * b) for b in range(blocks)]
    top = tops[0]
    for other in tops[1:]:
        top = arith.maximumf(top, other)
    total, values = mgpu.c(0.0, f32), [mgpu.c(0.0, f32)] * 2
    for b in range(blocks):
        weight = mgpu.utils.inline_ptx(
            "ex2.approx.f32 $0, $1;", arith.subf(tops[b], top), result_types=f32
        )
        total = arith.addf(total, arith.mulf(weight, load(sums, 2 * HEADS * b + HEADS)))
        for i in range(2):
            value = load(parts, (b * rows + i) * HEADS)
            values[i] = arith.addf(values[i], arith.mulf(weight, value))
    return [arith.divf(value, total) for value in values]

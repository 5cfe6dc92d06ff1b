"""Exchange of partial sums between the thread blocks of a cluster.

Each block is one warpgroup. It receives what the other blocks have summed for it, for instance its
own columns of every block's row (see `register_rows`), and every block's scalar. A kernel calls
`prepare` once. For each exchange it calls `expect`, sends (`send_parts` or `exchange_columns`), and
calls `wait_for_parts`; then the parts lie in shared memory, to be added in a fixed order. `release`
comes before this memory is used for something else. Blocks that exchange more than that do it
through GMEM and a `ClusterBarrier`, between two calls of `warpgroup.fence`.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import register_rows, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.decode import on_host


@primitive
def prepare(arrived_ref) -> None:
    """Prepares `arrived_ref` (SMEM, uint32 `[4]`): an mbarrier, and the parity of its phase."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, arrived_ref):
        ptx, arrived = mgpu.utils.inline_ptx, simt.smem_address(arrived_ref)
        is_first = simt.is_first_thread()
        ptx("mbarrier.init.shared.b64 [$0], 1;", arrived, predicate=is_first)
        ptx("st.shared.b32 [$0 + 8], 1;", arrived, predicate=is_first)
        ptx("fence.mbarrier_init.release.cluster;")

    step(arrived_ref)


@primitive
def expect(size: int, arrived_ref) -> None:
    """Says that this block has read the parts of the exchange before, and expects `size` bytes."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, arrived_ref):
        mgpu.warpgroup_barrier()  # no warp waits in the phase before any more
        mgpu.utils.inline_ptx(
            f"""{{.reg .b32 parity;
                @$1 ld.shared.b32 parity, [$0 + 8];
                @$1 xor.b32 parity, parity, 1;
                @$1 st.shared.b32 [$0 + 8], parity;
                @$1 mbarrier.arrive.expect_tx.shared.b64 _, [$0], {size};}}""",
            simt.smem_address(arrived_ref),
            simt.is_first_thread(),
            has_side_effects=True,
        )
        mgpu.utils.inline_ptx("barrier.cluster.arrive.aligned;", convergent=True)

    step(arrived_ref)


@primitive
def send_parts(
    y_part: jax.Array, l1_part: jax.Array, block: jax.Array, y_parts_ref, l1_parts_ref, arrived_ref
) -> None:
    """Sends each block of the cluster its columns of `y_part`, and `l1_part`.

    The stores are asynchronous and report their bytes to the receiver's barrier, so that no fence
    has to wait for them.

    Args:
      y_part: float32 row of `blocks * width` columns.
      l1_part: float32 scalar.
      block: int32 scalar, this block's rank in the cluster, and the row that it fills in
        `y_parts_ref` and `l1_parts_ref` of every receiver.
      y_parts_ref: SMEM, float32 `[blocks, width]`.
      l1_parts_ref: SMEM, float32 `[blocks]`.
      arrived_ref: of `expect`, with the bytes of both.
    """
    layout = register_rows.row_layout(y_part.size)

    @plgpu.inline_mgpu(arg_types=(layout, SCALAR, SCALAR, *(plgpu.RefType(),) * 3))
    def step(_, y_part, l1_part, block, y_parts_ref, l1_parts_ref, arrived_ref):
        ptx, const = mgpu.utils.inline_ptx, simt.const
        i32, f32 = ir.IntegerType.get_signless(32), ir.F32Type.get()
        (l1,), (block,) = l1_part.registers.flat, block.registers.flat
        blocks, width = ir.MemRefType(y_parts_ref.type).shape
        y_parts, l1_parts = simt.smem_address(y_parts_ref), simt.smem_address(l1_parts_ref)
        arrived = simt.smem_address(arrived_ref)
        store = "st.async.shared::cluster.mbarrier::complete_tx::bytes"

        def in_block(address, receiver):
            return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, receiver, result_types=i32)

        ptx("barrier.cluster.wait.aligned;", convergent=True)  # all blocks expect parts
        y_parts = arith.addi(y_parts, arith.muli(block, const(4 * width)))
        for column, chunk in register_rows.lane_columns(y_part):
            receiver = arith.divui(column, const(width))
            offset = arith.muli(arith.remui(column, const(width)), const(4))
            address = in_block(arith.addi(y_parts, offset), receiver)
            barrier = in_block(arrived, receiver)
            values = register_rows.elements(chunk, f32)
            for i in (0, 4):
                ptx(
                    f"{store}.v4.f32 [$0 + {4 * i}], {{$1, $2, $3, $4}}, [$5];",
                    address,
                    *values[i : i + 4],
                    barrier,
                )
        receiver = arith.remui(mgpu.thread_idx(), const(blocks))
        l1_parts = arith.addi(l1_parts, arith.muli(block, const(4)))
        ptx(
            f"{store}.f32 [$0], $1, [$2];",
            in_block(l1_parts, receiver),
            l1,
            in_block(arrived, receiver),
            predicate=simt.less(mgpu.thread_idx(), const(blocks)),
        )

    step(y_part, l1_part, block, y_parts_ref, l1_parts_ref, arrived_ref)


@send_parts.in_jax
def _send_parts(y_part, l1_part, block, y_parts_ref, l1_parts_ref, arrived_ref):
    del arrived_ref
    blocks, width = y_parts_ref.shape
    y_parts, l1_parts_ref[...] = on_host.of_all((y_part, l1_part), block, blocks)
    y_parts_ref[...] = lax.dynamic_slice_in_dim(y_parts, block * width, width, axis=1)


@primitive
def exchange_columns(accs: list[jax.Array], block: jax.Array, parts_ref, arrived_ref) -> None:
    """Sends each of the four blocks of this one's subcluster 16 of the 64 columns of `accs`.

    The columns of a product lie along the rows of its accumulator, so that each warp has those of
    one block.

    Args:
      accs: each float32 `[64, tokens]` in the WGMMA layout.
      block: int32 scalar, this block's rank in the cluster, whose first four ranks are a
        subcluster, and so on.
      parts_ref: SMEM, float32 `[len(accs), 4, 16 * tokens]`; a receiver gets this block's part at
        `[:, block % 4]`, in the order that `token_columns.add_parts` reads.
      arrived_ref: as in `expect`.
    """
    accumulators = [plgpu.Layout.WGMMA] * len(accs)

    @plgpu.inline_mgpu(arg_types=(accumulators, SCALAR, plgpu.RefType(), plgpu.RefType()))
    def step(_, accs, block, parts_ref, arrived_ref):
        ptx, const = mgpu.utils.inline_ptx, simt.const
        i32 = ir.IntegerType.get_signless(32)
        _, blocks, size = ir.MemRefType(parts_ref.type).shape
        lane, warp = simt.lane_and_warp()
        ptx("barrier.cluster.wait.aligned;", convergent=True)  # all blocks expect parts

        part, receiver = in_subcluster(block.registers.item(), warp)

        def in_receiver(address):
            return ptx("mapa.shared::cluster.u32 $0, $1, $2;", address, receiver, result_types=i32)

        # A register has two tokens of one column, which lie side by side.
        column = arith.shrui(lane, const(2))
        pair = arith.andi(lane, const(3))
        place = arith.addi(arith.muli(pair, const(32)), arith.muli(column, const(2)))
        place = arith.addi(place, arith.muli(part, const(size)))
        address = arith.addi(simt.smem_address(parts_ref), arith.muli(place, const(4)))
        address, barrier = in_receiver(address), in_receiver(simt.smem_address(arrived_ref))
        for a, acc in enumerate(accs):
            for i, register in enumerate(acc.registers.flat):
                eight, lower_rows = divmod(i, 2)
                offset = a * blocks * size + 128 * eight + 16 * lower_rows
                ptx(
                    "st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32"
                    f" [$0 + {4 * offset}], {{$1, $2}}, [$3];",
                    address,
                    *register_rows.elements(register, ir.F32Type.get()),
                    barrier,
                )

    step(accs, block, parts_ref, arrived_ref)


@exchange_columns.in_jax
def _exchange_columns(accs, block, parts_ref, arrived_ref):
    del arrived_ref
    sums, blocks, _ = parts_ref.shape
    rows, tokens = accs[0].shape
    columns = rows // blocks
    accs = on_host.of_all(jnp.stack(accs), block, blocks)
    mine = lax.dynamic_slice_in_dim(accs, block % blocks * columns, columns, axis=2)
    pairs = mine.reshape(blocks, sums, columns, tokens // 2, 2)
    parts_ref[...] = pairs.transpose(1, 0, 3, 2, 4).reshape(parts_ref.shape)


def in_subcluster(block: ir.Value, other: ir.Value) -> tuple[ir.Value, ir.Value]:
    """The place of a block in its subcluster, 0 to 3, given its rank in the cluster; and the rank
    of the block whose place is `other`."""
    part = arith.andi(block, simt.const(3))
    return part, arith.addi(arith.subi(block, part), other)


def send_words(
    words: list[ir.Value],
    address: ir.Value,
    stride: int,
    receiver: ir.Value,
    arrived_ref: ir.Value,
    predicate: ir.Value,
) -> None:
    """Sends float32 words of this lane to a block, inside `plgpu.inline_mgpu`.

    Args:
      words: what is sent.
      address: of the first word in this block's shared memory; it goes to the receiver's.
      stride: bytes from one word to the next.
      receiver: the block's rank in the cluster, i32.
      arrived_ref: as in `expect`.
      predicate: whether this lane sends, i1.
    """
    ptx, i32 = mgpu.utils.inline_ptx, ir.IntegerType.get_signless(32)
    ptx("barrier.cluster.wait.aligned;", convergent=True)  # all blocks expect words
    address, barrier = (
        ptx("mapa.shared::cluster.u32 $0, $1, $2;", a, receiver, result_types=i32)
        for a in (address, simt.smem_address(arrived_ref))
    )
    for i, word in enumerate(words):
        ptx(
            "st.async.shared::cluster.mbarrier::complete_tx::bytes.f32 "
            f"[$0 + {i * stride}], $1, [$2];",
            address,
            word,
            barrier,
            predicate=predicate,
        )


@primitive
def wait_for_parts(arrived_ref) -> None:
    """Waits until every block of the cluster has sent its parts to this one."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, arrived_ref):
        mgpu.utils.inline_ptx(
            "{ .reg .pred done; .reg .b32 parity; ld.shared.b32 parity, [$0 + 8]; wait: "
            "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 done, [$0], parity; "
            "@!done bra wait; }",
            simt.smem_address(arrived_ref),
            convergent=True,
        )

    step(arrived_ref)


@primitive
def release(arrived_ref) -> None:
    """Ends the mbarrier in `arrived_ref`, whose memory may not be used otherwise before: keys of
    `decode_attention` became NaN where it lay."""

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def step(_, arrived_ref):
        mgpu.warpgroup_barrier()  # no warp waits any more
        mgpu.utils.inline_ptx(
            "mbarrier.inval.shared.b64 [$0];",
            simt.smem_address(arrived_ref),
            predicate=simt.is_first_thread(),
        )

    step(arrived_ref)


@prepare.in_jax
@expect.in_jax
@wait_for_parts.in_jax
@release.in_jax
def _need_no_barrier(*_):
    """The twins that send wait for each other."""

"""Shares out the non-zeros of a token among the blocks of a cluster."""

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.device import gather, simt

_ROUND_NEURONS = 8192  # neurons that the lanes hold at a time


def collect_share(gate_ref, share, shares: int, entries_ref, counts_ref) -> jax.Array:
    """Lists every `shares`-th non-zero of one token, from the `share`-th on, in a fixed order.

    Args:
      gate_ref: GMEM `[H]`, 16-bit.
      share: int32 scalar, from 0 to shares - 1.
      shares: number of blocks among which the non-zeros are shared out.
      entries_ref: SMEM, uint32, at least H / shares; filled with words `neuron | bits << 16`.
      counts_ref: SMEM, int32 `[2, 4]`, workspace.

    Returns:
      int32 scalar, the token's number of non-zeros in all shares.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), gather.SCALAR, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=gather.SCALAR),
    )
    def step(_, gate_ref, share, entries_ref, counts_ref):
        # `step` is long because one lane's counts, ranks and addresses go through all of it.
        ptx, const, less = mgpu.utils.inline_ptx, simt.const, simt.less
        i32 = ir.IntegerType.get_signless(32)
        (share,) = share.registers.flat
        (h,) = ir.MemRefType(gate_ref.type).shape
        lane, warp = simt.lane_and_warp()
        entries, all_counts = simt.smem_address(entries_ref), simt.smem_address(counts_ref)

        # Each lane takes every 128th chunk of 8 neurons.
        first = arith.muli(arith.addi(arith.muli(warp, const(32)), lane), const(8))
        address = simt.gmem_address(gate_ref, arith.muli(first, const(2)))

        def load(chunk):
            return simt.load_chunk(address, 2 * chunk, less(first, const(h - chunk)))

        total = const(0)
        for start in range(0, h, _ROUND_NEURONS):
            pairs, count = [], const(0)
            for chunk in range(start, min(start + _ROUND_NEURONS, h), 128 * 8):
                for i, pair in enumerate(load(chunk)):
                    ones = ptx(
                        "{ .reg .b32 ones; min.u16x2 ones, $1, $2; popc.b32 $0, ones; }",
                        pair,
                        const(0x00010001),
                        result_types=i32,
                    )
                    pairs.append((chunk + 2 * i, pair, ones))
                    count = arith.addi(count, ones)

            end = simt.inclusive_sum(count, lane)
            counts = arith.addi(all_counts, const(16 * (start // _ROUND_NEURONS % 2)))
            mine = arith.addi(counts, arith.muli(warp, const(4)))
            ptx("st.shared.b32 [$0], $1;", mine, end, predicate=less(const(30), lane))
            mgpu.warpgroup_barrier()
            counts = ptx(
                "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
                counts,
                result_types=[i32] * 4,
                has_side_effects=True,
            )
            rank = arith.addi(total, arith.subi(end, count))
            for w, warp_count in enumerate(counts):
                rank = arith.select(less(const(w), warp), arith.addi(rank, warp_count), rank)
                total = arith.addi(total, warp_count)

            for neuron, pair, ones in pairs:
                with mgpu.utils.when(less(const(0), pair)):  # few pairs are, so few warps enter
                    own_rank = rank
                    for i in range(2):
                        bits = arith.andi(arith.shrui(pair, const(16 * i)), const(0xFFFF))
                        is_entry = less(const(0), bits)
                        owner = arith.remui(own_rank, const(shares))
                        is_mine = arith.cmpi(arith.CmpIPredicate.eq, owner, share)
                        place = arith.muli(arith.divui(own_rank, const(shares)), const(4))
                        column = arith.addi(first, const(neuron + i))
                        ptx(
                            "st.shared.b32 [$0], $1;",
                            arith.addi(entries, place),
                            arith.ori(column, arith.shli(bits, const(16))),
                            predicate=arith.andi(is_entry, is_mine),
                        )
                        own_rank = arith.addi(own_rank, arith.extui(i32, is_entry))
                rank = arith.addi(rank, ones)
        mgpu.warpgroup_barrier()
        return mgpu.FragmentedArray.splat(total, (), is_signed=True)

    return step(gate_ref, share, entries_ref, counts_ref)

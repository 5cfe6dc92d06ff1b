"""Shares out the non-zeros of a token among the thread blocks of a cluster."""

import functools
from typing import NamedTuple

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
from pallas_kernels.hopper.decode import token_columns

_LANES = 128
_BY_LANE = plgpu.Layout.WG_STRIDED((_LANES,), vec_size=1)
_CHUNK = 8  # neighbouring neurons in the 16 bytes of a load
_PASS = _LANES * _CHUNK  # neurons of which each lane has a chunk
_MASK_PASSES = 4  # the bits of a lane's neurons in so many passes fill a word
_ROUND = 2 * _MASK_PASSES * _PASS  # neurons that the lanes hold at a time


class Found(NamedTuple):
    """A token's non-zeros as each lane has found them.

    Attributes:
      masks: int32 `[128]` each, a word of every lane; see `_masks`.
      ranks: likewise, of a word's first bit among all non-zeros.
      total: int32 scalar, their number.
    """

    masks: list[jax.Array]
    ranks: list[jax.Array]
    total: jax.Array


@primitive
def find(gate_ref, active, counts_ref) -> Found:
    """Finds the non-zeros of one token.

    Args:
      gate_ref: GMEM `[H]`, 16-bit.
      active: bool scalar; if it is False, nothing is read and nothing found.
      counts_ref: SMEM, int32 `[2, 4]`, workspace.
    """
    (h,) = gate_ref.shape
    words = [
        plgpu.ShapeDtypeStruct((_LANES,), jnp.int32, layout=_BY_LANE)
        for _ in range(pl.cdiv(h, _MASK_PASSES * _PASS))
    ]
    total = plgpu.ShapeDtypeStruct((), jnp.int32, layout=SCALAR)

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, plgpu.RefType()),
        return_type=Found(words, words, total),
    )
    def step(_, gate_ref, active, counts_ref):
        lane, warp = simt.lane_and_warp()
        all_counts = simt.smem_address(counts_ref)
        total, found = const(0), Found([], [], None)
        for start in range(0, h, _ROUND):
            masks = _masks(gate_ref, active.registers.item(), start)
            bits = [lanes.popcount(mask) for mask in masks]
            count = functools.reduce(arith.addi, bits)
            end = simt.inclusive_sum(count, lane)
            counts = arith.addi(all_counts, const(16 * (start // _ROUND % 2)))
            rank = arith.addi(total, arith.subi(end, count))
            for w, of_warp in enumerate(_exchange(counts, end, lane, warp)):
                is_before = simt.less(const(w), warp)
                rank = arith.addi(rank, arith.select(is_before, of_warp, const(0)))
                total = arith.addi(total, of_warp)
            for mask, n in zip(masks, bits, strict=True):
                found.masks.append(_by_lane(mask))
                found.ranks.append(_by_lane(rank))
                rank = arith.addi(rank, n)
        return found._replace(total=mgpu.FragmentedArray.splat(total, (), is_signed=True))

    return step(gate_ref, active, counts_ref)


@find.in_jax
def _find(gate_ref, active, counts_ref):
    """No masks: `_list_share` finds the non-zeros once more."""
    del counts_ref
    total = jnp.sum(_bits(gate_ref) != 0, dtype=jnp.int32)
    return Found([], [], jnp.where(active, total, 0))


@primitive
def list_share(found: Found, gate_ref, share, shares: int, entries_ref) -> None:
    """Lists every `shares`-th non-zero of a token, from the `share`-th on, in a fixed order.

    Args:
      found: of `find`, with the same `gate_ref`.
      gate_ref: GMEM `[H]`, 16-bit.
      share: int32 scalar, from 0 to shares - 1.
      shares: number of thread blocks among which the non-zeros are shared out, a power of two.
      entries_ref: SMEM, uint32, at least H / shares; filled with words `neuron | bits << 16`.
    """
    words = len(found.masks) * [_BY_LANE]

    @plgpu.inline_mgpu(
        arg_types=(words, words, plgpu.RefType(), SCALAR, plgpu.RefType()),
    )
    def step(_, masks, ranks, gate_ref, share, entries_ref):
        gate, entries = simt.gmem_address(gate_ref, const(0)), simt.smem_address(entries_ref)
        for i, (mask, rank) in enumerate(zip(masks, ranks, strict=True)):
            column = arith.addi(_first_column(), const(i * _MASK_PASSES * _PASS))
            lane_values = (token_columns.element(a.registers.item()) for a in (mask, rank))
            _store_entries(*lane_values, column, gate, entries, share.registers.item(), shares)
        mgpu.warpgroup_barrier()

    step(found.masks, found.ranks, gate_ref, share, entries_ref)


@list_share.in_jax
def _list_share(found, gate_ref, share, shares, entries_ref):
    del found
    bits = _bits(gate_ref)
    rank = jnp.cumsum(bits != 0) - 1
    is_mine = (bits != 0) & (rank % shares == share)
    words = jnp.arange(bits.size, dtype=jnp.uint32) | bits << 16
    places = jnp.where(is_mine, rank // shares, entries_ref.shape[0])
    # Past the list may be whatever was there.
    entries = jnp.full(entries_ref.shape, 0xFFFFFFFF, jnp.uint32)
    entries_ref[...] = entries.at[places].set(words, mode="drop")


def _bits(gate_ref):
    return lax.bitcast_convert_type(gate_ref[...], jnp.uint16).astype(jnp.uint32)


def _by_lane(value: ir.Value) -> mgpu.FragmentedArray:
    one = vector.from_elements(ir.VectorType.get((1,), value.type), [value])
    registers = np.array([one], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=_BY_LANE.to_mgpu(), _is_signed=True)


def _first_column() -> ir.Value:
    lane = arith.andi(mgpu.thread_idx(), const(_LANES - 1))
    return arith.muli(lane, const(_CHUNK))


def _masks(gate_ref: ir.Value, active: ir.Value, start: int) -> list[ir.Value]:
    """Which of this lane's neurons from `start` on are not zero, in one or two words; none if not
    `active`.

    Bit 4 p + w of a word, and bit 16 + 4 p + w, are the two neurons in word w of the chunk that the
    lane has in the word's p-th pass.
    """
    (h,) = ir.MemRefType(gate_ref.type).shape
    first = _first_column()
    address = simt.gmem_address(gate_ref, arith.muli(first, const(2)))
    loads = []
    for p in range(start, min(start + _ROUND, h), _PASS):
        is_there = arith.andi(simt.less(first, const(h - p)), active)
        loads.append(simt.load_chunk(address, 2 * p, is_there))
    masks = []
    for i in range(0, len(loads), _MASK_PASSES):
        mask = const(0)
        for bit, pair in enumerate(pair for load in loads[i : i + _MASK_PASSES] for pair in load):
            ones = lanes.ptx("min.u16x2 $0, $1, $2;", pair, const(0x00010001))
            mask = arith.ori(mask, arith.shli(ones, const(bit)))
        masks.append(mask)
    return masks


def _exchange(counts: ir.Value, end: ir.Value, lane: ir.Value, warp: ir.Value) -> list[ir.Value]:
    """What `end` is in the last lane of each warp, through 16 bytes of SMEM at `counts`."""
    ptx = mgpu.utils.inline_ptx
    mine = arith.addi(counts, arith.muli(warp, const(4)))
    ptx("st.shared.b32 [$0], $1;", mine, end, predicate=simt.less(const(30), lane))
    mgpu.warpgroup_barrier()
    return list(
        ptx(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
            counts,
            result_types=[const(0).type] * 4,
            has_side_effects=True,
        )
    )


def _store_entries(mask, rank, column, gate, entries, share, shares: int) -> None:
    """Stores the entries of this lane's bits in a word of `_masks` that fall to this block.

    Few lanes have a bit, so a loop over bits is over when a test of each neuron would have begun.

    Args:
      mask: the word.
      rank: of its first bit among all non-zeros.
      column: the lane's first neuron in the word's first pass.
      gate, entries: addresses in GMEM and SMEM.
      share, shares: as of `list_share`.
    """
    mgpu.utils.inline_ptx(
        f"""{{.reg .pred none, mine; .reg .b32 mask, bit, rank, neuron, x; .reg .b64 address;
            mov.b32 mask, $0; mov.b32 rank, $1;
            next: setp.eq.u32 none, mask, 0;
            @none bra done;
            brev.b32 bit, mask; clz.b32 bit, bit;
            sub.u32 x, mask, 1; and.b32 mask, mask, x;
            and.b32 x, bit, 12; mad.lo.u32 neuron, x, {_PASS // 4}, $2;
            and.b32 x, bit, 3; mad.lo.u32 neuron, x, 2, neuron;
            shr.u32 x, bit, 4; add.u32 neuron, neuron, x;
            and.b32 x, rank, {shares - 1}; setp.eq.u32 mine, x, $5;
            mad.wide.u32 address, neuron, 2, $3;
            shr.u32 x, rank, {shares.bit_length() - 1}; mad.lo.u32 bit, x, 4, $4;
            @mine ld.global.u16 x, [address];
            shl.b32 x, x, 16; or.b32 x, x, neuron;
            @mine st.shared.b32 [bit], x;
            add.u32 rank, rank, 1;
            bra next;
            done: }}""",
        mask,
        rank,
        column,
        gate,
        entries,
        share,
        has_side_effects=True,
    )

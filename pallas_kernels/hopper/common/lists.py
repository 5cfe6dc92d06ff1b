"""Lists in device memory that kernels write for other kernels to read."""

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, scf

from pallas_kernels.hopper.common import engine, lanes, scalars, simt
from pallas_kernels.hopper.common.primitives import count_together, primitive
from pallas_kernels.hopper.common.scalars import INT32, SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.layouts import tile_union

_LENGTH = "length of the list"  # names for `count_together`
_FINISHED = "thread blocks that have finished the list"


@primitive
def append(length_ref, n: jax.Array, scratch_ref) -> jax.Array:
    """Takes places for n more elements: the warpgroup adds n once, atomically, to the length.

    Args:
      length_ref: GMEM, int32 `[1]`, the length of the list.
      n: int32 scalar.
      scratch_ref: SMEM, at least 4 bytes.

    Returns:
      int32 scalar, the length before.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), SCALAR, plgpu.RefType()), return_type=INT32)
    def step(_, length_ref, n, scratch_ref):
        address = simt.gmem_address(length_ref, const(0))
        length = simt.first_thread_atomic("add", address, n.registers.item())
        length = simt.broadcast_first(length, simt.smem_address(scratch_ref))
        return scalars.int32(length)

    return step(length_ref, n, scratch_ref)


@append.in_jax
def _(length_ref, n, scratch_ref):
    return count_together(_LENGTH, lambda length, n: length + n, n)


@primitive
def finish(counters_ref, length_ref, blocks: int) -> None:
    """Each of `blocks` thread blocks says that it appends no more; the last one ends the list.

    What its warpgroups have stored before, and told this one by a barrier, is then visible to
    whoever sees that all thread blocks have finished, and calls `acquire`.

    Args:
      counters_ref: GMEM, int32, at least 2: the length of the list, and the number of thread
        blocks that have finished. The last one sets both to 0.
      length_ref: GMEM, int32 `[1]`, gets the length.
      blocks: their number.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def step(_, counters_ref, length_ref):
        mgpu.utils.inline_ptx(
            f"""{{.reg .b32 before, length; .reg .pred last;
                mov.b32 before, -1;
                fence.acq_rel.gpu;
                @$2 atom.global.inc.u32 before, [$0 + 4], {blocks - 1};
                setp.eq.and.u32 last, before, {blocks - 1}, $2;
                fence.acq_rel.gpu;
                @last atom.global.exch.b32 length, [$0], 0;
                @last st.global.b32 [$1], length;
                fence.acq_rel.gpu;}}""",
            simt.gmem_address(counters_ref, const(0)),
            simt.gmem_address(length_ref, const(0)),
            simt.is_first_thread(),
            has_side_effects=True,
        )
        mgpu.warpgroup_barrier()  # no warp goes on before the first one has done this

    step(counters_ref, length_ref)


@finish.in_jax
def _(counters_ref, length_ref, blocks):
    finished = count_together(_FINISHED, lambda before: (before + 1) % blocks)

    @pl.when(finished == blocks - 1)
    def _():
        length_ref[0] = count_together(_LENGTH, lambda _: 0)


@primitive
def acquire() -> None:
    """Lets this thread, and its TMA copies, see a list that another kernel has finished."""

    by_tma = engine.current().has_tma

    @plgpu.inline_mgpu()
    def step(_):
        mgpu.utils.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
        if by_tma:
            mgpu.utils.inline_ptx("fence.proxy.async.global;", has_side_effects=True)

    step()


@acquire.in_jax
def _():
    """The interpreter has ended the other kernel."""


@primitive
def append_bits(bits_ref, first_word: jax.Array, list_ref, length: jax.Array) -> jax.Array:
    """Appends the indices of the bits that are set in up to 32 words, in ascending order.

    Args:
      bits_ref: GMEM, uint32 `[n]`; bit i % 32 of word i // 32 has index i.
      first_word: int32 scalar, the index of the first of these words.
      list_ref: GMEM, int32.
      length: int32 scalar, the length of the list so far.

    Returns:
      int32 scalar, the length afterwards.
    """
    (n,) = bits_ref.shape

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), SCALAR, plgpu.RefType(), SCALAR), return_type=INT32
    )
    def step(_, bits_ref, first_word, list_ref, length):
        first_word, length = first_word.registers.item(), length.registers.item()
        lane, warp = simt.lane_and_warp()
        mine = arith.addi(first_word, lane)
        address = simt.gmem_address(bits_ref, arith.muli(mine, const(4)))
        (word,) = simt.load_words(address, 0, simt.less(mine, const(n)), n=1)
        count = lanes.popcount(word)
        end = arith.addi(length, simt.inclusive_sum(count, lane))
        start = arith.subi(end, count)
        below = arith.subi(arith.shli(const(1), lane), const(1))
        for i in range(8):  # each warp takes every fourth word, each lane a bit of it
            source = arith.addi(warp, const(4 * i))
            bits = simt.from_lane(word, source)
            rank = arith.addi(
                simt.from_lane(start, source), lanes.popcount(arith.andi(bits, below))
            )
            place = arith.addi(arith.muli(arith.addi(first_word, source), const(32)), lane)
            is_set = arith.andi(arith.shrui(bits, lane), const(1))
            simt.store_words(list_ref, rank, [place], lanes.nonzero(is_set))
        return scalars.int32(simt.from_lane(end, const(31)))

    return step(bits_ref, first_word, list_ref, length)


@append_bits.in_jax
def _(bits_ref, first_word, list_ref, length):
    bits = tile_union.to_bits(bits_ref[...])
    place = jnp.arange(bits.size)
    is_here = bits & (place // 1024 == first_word // 32)
    rank = jnp.where(is_here, length + jnp.cumsum(is_here) - 1, bits.size)
    list_ref[...] = list_ref[...].at[rank].set(place, mode="drop")
    return length + jnp.sum(is_here, dtype=jnp.int32)


@primitive
def clear(rows_ref, list_ref, length: jax.Array, column: jax.Array) -> None:
    """Sets `rows[list[i], column]` to zero for each i < length.

    Args:
      rows_ref: GMEM `[n, columns]`, 16-bit.
      list_ref: GMEM, int32, which this warpgroup may have written before its last barrier.
      length, column: int32 scalars.
    """
    columns = rows_ref.shape[1]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR, SCALAR))
    def step(_, rows_ref, list_ref, length, column):
        index_type, i32 = ir.IndexType.get(), ir.IntegerType.get_signless(32)
        lane, warp = simt.lane_and_warp()
        thread = arith.index_cast(index_type, arith.addi(arith.muli(warp, const(32)), lane))
        end = arith.index_cast(index_type, length.registers.item())
        rows = simt.gmem_address(rows_ref, arith.muli(column.registers.item(), const(2)))
        loop = scf.ForOp(thread, end, mgpu.c(128, index_type))
        with ir.InsertionPoint(loop.body):
            i = arith.index_cast(i32, loop.induction_variable)
            mgpu.utils.inline_ptx(
                f"""{{.reg .b32 row; .reg .b64 address; .reg .b16 zero;
                    mov.b16 zero, 0;
                    ld.global.b32 row, [$0];
                    mad.wide.u32 address, row, {2 * columns}, $1;
                    st.global.b16 [address], zero;}}""",
                simt.gmem_address(list_ref, arith.muli(i, const(4))),
                rows,
                has_side_effects=True,
            )
            scf.YieldOp([])

    step(rows_ref, list_ref, length, column)


@clear.in_jax
def _(rows_ref, list_ref, length, column):
    rows = jnp.where(jnp.arange(list_ref.size) < length, list_ref[...], list_ref.size)
    rows_ref[...] = rows_ref[...].at[rows, column].set(0, mode="drop")

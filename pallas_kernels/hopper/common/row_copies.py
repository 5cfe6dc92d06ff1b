"""Gathers rows from GMEM to SMEM, 16 bytes per lane and instruction.

TMA cannot gather rows on Hopper, so a warpgroup copies them by `cp.async`: `gather_rows` starts the
copies, `await_rows` waits for them. The row indices are loaded from GMEM directly (`load_indices`),
or copied to SMEM ahead of the rows (`fetch_indices`) and loaded from there, or the rows are
`consecutive`. A lane copies pieces of up to 8 rows (`lane_rows`), and has their indices.
"""

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels.hopper.common import engine, lanes, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import tiled

_LANES = 128
_CHUNK = 16  # bytes that a lane copies at a time
_TILE_ROWS = 8  # of a tile of `tiled`, the most that a lane copies pieces of


def lane_rows(shape: tuple[int, ...], dtype: jax.typing.DTypeLike) -> int:
    """The rows of a stage of this shape and dtype that a lane copies pieces of."""
    count, columns = shape
    chunks = columns * jnp.dtype(dtype).itemsize // _CHUNK
    return max(1, min(pl.next_power_of_2(count) * chunks // _LANES, _TILE_ROWS))


def _lane_chunks(rows: int, count: int) -> int:
    """Of `count` rows the chunks of a row that a warpgroup, each lane of `rows`, copies at once."""
    return _LANES * rows // pl.next_power_of_2(count)


def _layout(rows: int):
    return plgpu.Layout.WG_STRIDED((rows * _LANES,), vec_size=1)


@primitive
def load_indices(indices_ref, rows: int, *, fetched: bool = False) -> jax.Array:
    """Loads row indices for `gather_rows`, those of a lane's `rows`.

    Args:
      indices_ref: GMEM, int32 `[128]`; or, if `fetched`, SMEM as `fetch_indices` fills it.
      rows: of `lane_rows`.
      fetched: whether they are in SMEM.
    """
    result = plgpu.ShapeDtypeStruct((rows * _LANES,), jnp.int32, layout=_layout(rows))
    (count,) = indices_ref.shape

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def step(_, indices_ref):
        group, _ = _group_and_chunk(rows, count)
        place = arith.muli(group, const(4 * rows))
        if fetched:
            load, address = "ld.shared", arith.addi(simt.smem_address(indices_ref), place)
            _warp_barrier()  # other lanes' copies have to be visible
        else:
            load, address = "ld.global", simt.gmem_address(indices_ref, place)
        # Neither .nc nor pure: the load must start here, not later, where an index is first used,
        # nor earlier, before the last fence, which would wait for it.
        words = [
            word
            for offset in range(0, 4 * rows, 16)
            for word in mgpu.utils.inline_ptx(
                f"{load}.v4.b32 {{$0, $1, $2, $3}}, [$4 + {offset}];",
                address,
                result_types=[ir.IntegerType.get_signless(32)] * 4,
                has_side_effects=True,
            )
        ]
        return simt.int_array(words, _layout(rows))

    return step(indices_ref)


@load_indices.in_jax
def _(indices_ref, rows, *, fetched=False):
    del rows, fetched
    return indices_ref[...]


@primitive
def consecutive(first: jax.Array, count: int, rows: int) -> jax.Array:
    """The indices of `count` rows from `first` on, for `gather_rows`; `rows` of a lane."""
    result = plgpu.ShapeDtypeStruct((rows * _LANES,), jnp.int32, layout=_layout(rows))

    @plgpu.inline_mgpu(arg_types=(SCALAR,), return_type=result)
    def step(_, first):
        group, _ = _group_and_chunk(rows, count)
        mine = arith.addi(first.registers.item(), arith.muli(group, const(rows)))
        return simt.int_array([arith.addi(mine, const(i)) for i in range(rows)], _layout(rows))

    return step(first)


@consecutive.in_jax
def _(first, count, rows):
    del rows
    return first + jnp.arange(count, dtype=jnp.int32)


@primitive
def fetch_indices(indices_ref, target_ref, active: jax.Array) -> None:
    """Starts to copy 32 or 64 indices from GMEM to SMEM if `active`; each warp copies its own
    rows'."""
    chunks = indices_ref.shape[0] // _CHUNK  # of a warp's indices

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), SCALAR))
    def step(_, indices_ref, target_ref, active):
        lane, warp = simt.lane_and_warp()
        offset = arith.muli(arith.addi(arith.muli(warp, const(chunks)), lane), const(_CHUNK))
        _warp_barrier()  # until all lanes have read what was there
        mgpu.utils.inline_ptx(
            "cp.async.cg.shared.global [$0], [$1], 16;",
            arith.addi(simt.smem_address(target_ref), offset),
            simt.gmem_address(indices_ref, offset),
            predicate=arith.andi(active.registers.item(), simt.less(lane, const(chunks))),
        )

    step(indices_ref, target_ref, active)


@fetch_indices.in_jax
def _(indices_ref, target_ref, active):
    @pl.when(active)
    def _():
        target_ref[...] = indices_ref[...]


def _warp_barrier() -> None:
    mgpu.utils.inline_ptx("bar.warp.sync -1;", has_side_effects=True, convergent=True)


@primitive
def gather_rows(source_ref, indices, limit: jax.Array, column: jax.Array, target_ref) -> None:
    """A warpgroup starts to copy rows of `source_ref` to `target_ref`.

    Row i of the target is `source[indices[i], column:]`, or zeros if i >= limit; columns past D are
    zeros.

    Args:
      source_ref: GMEM `[H, D]`, 16-bit or 8-bit, rows of a multiple of 16 bytes.
      indices: from `load_indices` or `consecutive`; anything from limit on.
      limit: int32 scalar.
      column: int32 scalar, the first of 16 bytes.
      target_ref: SMEM, 8 to 256 rows, a multiple of 8, of a power of two of bytes, 32 or more, with
        transforms `tiled`.
    """
    size = jnp.dtype(source_ref.dtype).itemsize
    count, columns = target_ref.shape
    row_bytes = min(columns * size, 128)  # of a tile
    tile_chunks, chunks = row_bytes // _CHUNK, columns * size // _CHUNK
    rows = lane_rows(target_ref.shape, target_ref.dtype)
    width = _lane_chunks(rows, count)
    has_idle_lanes = width > chunks or _LANES * rows != width * count
    swizzle = {128: 0, 64: 1, 32: 2}[row_bytes]  # of a row's number, this bit and those above it
    # Short rows of several groups lie in the same banks, so that groups take theirs in turn.
    turns = min(rows, 1 << swizzle)
    d = source_ref.shape[1]
    target_type = plgpu.RefType(tiled(target_ref.dtype, columns))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), _layout(rows), SCALAR, SCALAR, target_type))
    def step(_, source_ref, indices, limit, column, target_ref):
        group, first_chunk = _group_and_chunk(rows, count)
        first_row = arith.muli(group, const(rows))
        row_in_tile = arith.remui(first_row, const(_TILE_ROWS))
        turn = arith.andi(group, const(turns - 1))
        my_indices = [mgpu.utils.bitcast(i, turn.type) for i in indices.registers]
        for bit in (b for b in (1, 2) if b < turns):
            is_other = lanes.nonzero(arith.andi(turn, const(bit)))
            my_indices = [
                arith.select(is_other, my_indices[i ^ bit], my_indices[i]) for i in range(rows)
            ]
        if has_idle_lanes:
            is_busy = arith.andi(
                simt.less(first_row, const(count)), simt.less(first_chunk, const(chunks))
            )
        for part in range(0, chunks, width):
            chunk = arith.addi(first_chunk, const(part))
            # The target consists of tiles in row-major order; chunks of a row are swizzled.
            tile = arith.muli(
                arith.divui(first_row, const(_TILE_ROWS)), const(chunks // tile_chunks)
            )
            tile = arith.addi(tile, arith.divui(chunk, const(tile_chunks)))
            place = arith.addi(arith.muli(tile, const(_TILE_ROWS)), row_in_tile)
            place = arith.addi(simt.smem_address(target_ref), arith.muli(place, const(row_bytes)))
            swizzled = arith.xori(
                arith.remui(chunk, const(tile_chunks)), arith.shrui(row_in_tile, const(swizzle))
            )
            my_column = arith.addi(
                column.registers.item(), arith.muli(chunk, const(_CHUNK // size))
            )
            source = simt.gmem_address(source_ref, arith.muli(my_column, const(size)))
            is_column = simt.less(my_column, const(d))
            my_limit = arith.subi(limit.registers.item(), first_row)
            for i, index in enumerate(my_indices):
                mine = arith.xori(const(i), turn)
                is_row = arith.cmpi(arith.CmpIPredicate.slt, mine, my_limit)
                my_chunk = arith.xori(swizzled, const(i >> swizzle))
                low = arith.muli(arith.xori(const(i % turns), turn), const(row_bytes))
                distance = i // turns * turns * row_bytes
                mgpu.utils.inline_ptx(
                    f"""{{.reg .b32 index, bytes; .reg .b64 address;
                        selp.b32 bytes, 16, 0, $3;
                        selp.b32 index, $2, 0, $3;
                        mad.wide.u32 address, index, {size * d}, $1;
                        {"@$4" if has_idle_lanes else ""}
                        cp.async.cg.shared.global [$0 + {distance}], [address], 16,
                        bytes;}}""",
                    arith.addi(arith.addi(place, low), arith.muli(my_chunk, const(_CHUNK))),
                    source,
                    index,
                    arith.andi(is_row, is_column),
                    *([is_busy] if has_idle_lanes else []),
                    has_side_effects=True,
                )

    step(source_ref, indices, limit, column, target_ref)


@gather_rows.in_jax
def _(source_ref, indices, limit, column, target_ref):
    n, width = target_ref.shape
    source = jnp.pad(source_ref[...], ((0, 0), (0, width)))
    rows = lax.dynamic_slice_in_dim(source[indices], column, width, axis=1)
    target_ref[...] = jnp.where((jnp.arange(n) < limit)[:, None], rows, 0)


def _group_and_chunk(rows: int, count: int):
    """Of `count` rows the group of `rows` that this lane copies from, and its chunk of each."""
    width, thread = const(_lane_chunks(rows, count)), simt.thread()
    return arith.divui(thread, width), arith.remui(thread, width)


@primitive
def await_rows(*, lag: int) -> None:
    """Commits the copies of one step, and waits for those of all steps but the last `lag`."""
    fence = "fence.proxy.async.shared::cta;" if engine.current().has_tma else ""  # for WGMMA

    @plgpu.inline_mgpu()
    def step(_):
        mgpu.utils.inline_ptx(
            f"cp.async.commit_group; cp.async.wait_group {lag}; {fence}", has_side_effects=True
        )

    step()


@await_rows.in_jax
def _(*, lag):
    plgpu.commit_smem()

"""Steps of `decode_attention` that the Pallas language lacks; a warpgroup of 128 lanes runs each.

Shared memory that a WGMMA reads consists of 8 x 64 tiles of 16-bit numbers, 1024 bytes each, in
row-major order; in row r of a tile, the 16-byte chunk c lies at place c XOR r. A lane writes it
through the generic proxy, so a fence and a barrier follow before the WGMMA.
"""

import dataclasses

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from pallas_kernels.hopper.common import register_rows, simt
from pallas_kernels.hopper.common.primitives import primitive
from pallas_kernels.hopper.common.scalars import SCALAR
from pallas_kernels.hopper.common.simt import const
from pallas_kernels.hopper.common.tiles import TILED

HEADS = 8  # columns of the products: the fewest that a WGMMA has
_TILE = 1024  # bytes of a tile in shared memory


@dataclasses.dataclass(frozen=True)
class Heads:
    """Shape of the heads: `all` query heads, `stored` key/value heads, `size` features each."""

    all: int
    stored: int
    size: int

    @property
    def group(self) -> int:
        """Query heads that share a key/value head."""
        return self.all // self.stored


@primitive
def place_new(qkv_ref, rope_refs, head, is_owner, q_smem, new_smem, stored_refs, *, heads: Heads):
    """Rotates query and key of a new token; puts them and its value into shared memory.

    Args:
      qkv_ref: GMEM `[(heads.all + 2 heads.stored) * heads.size]`, 16-bit: query, key, value.
      rope_refs: GMEM, cosine and sine, float32 `[heads.size / 2]` each.
      head: int32 scalar, the key/value head.
      is_owner: bool scalar, whether to store key and value to `stored_refs` as well.
      q_smem: SMEM `[8, heads.size]` with transforms `TILED`; the queries, zero past the group.
      new_smem: SMEM `[2, heads.size]`; the key and the value.
      stored_refs: GMEM, key and value, `[heads.size]` each.
    """
    gmem = plgpu.RefType()

    @plgpu.inline_mgpu(
        arg_types=(gmem, [gmem] * 2, *(SCALAR,) * 2, plgpu.RefType(TILED), gmem, [gmem] * 2)
    )
    def step(_, qkv_ref, rope_refs, head, is_owner, q_smem, new_smem, stored_refs):
        # A lane has 8 features of the first half of one vector, and their partners in the second.
        # Vectors 0 to 7 are queries, 8 is the key, 9 the value.
        (head,), (is_owner,) = head.registers.flat, is_owner.registers.flat
        pairs = const(heads.size // 16)
        thread = arith.remui(mgpu.thread_idx(), const(128))
        number, chunk = arith.divui(thread, pairs), arith.remui(thread, pairs)
        is_query = simt.less(number, const(HEADS))
        is_key, is_value = (_equal(number, const(HEADS + i)) for i in (0, 1))
        is_new = arith.ori(is_key, is_value)
        is_used = arith.ori(simt.less(number, const(heads.group)), is_new)
        offset = arith.muli(_first_column(head, number, is_query, heads), const(2))
        offset = arith.addi(offset, arith.muli(chunk, const(16)))
        halves = _load_two(qkv_ref, offset, heads.size, is_used)
        turn = arith.muli(chunk, const(32))
        turns = [_load_two(ref, turn, 16, is_used) for ref in rope_refs]
        rotated = _rotate(halves, turns, ir.MemRefType(qkv_ref.type).element_type)
        targets = [simt.gmem_address(ref, arith.muli(chunk, const(16))) for ref in stored_refs]
        target = arith.select(is_key, *targets)
        new = arith.addi(
            simt.smem_address(new_smem),
            arith.muli(arith.subi(number, const(HEADS)), const(2 * heads.size)),
        )
        for i, (plain, turned) in enumerate(zip(halves, rotated, strict=True)):
            words = [arith.select(is_value, *both) for both in zip(plain, turned, strict=True)]
            place = arith.addi(chunk, const(heads.size // 16 * i))
            query = arith.addi(simt.smem_address(q_smem), _chunk_offset(number, place, heads.size))
            new_chunk = arith.addi(new, arith.muli(place, const(16)))
            _store(
                "shared",
                arith.select(is_query, query, new_chunk),
                words,
                arith.ori(is_query, is_new),
            )
            stored_chunk = arith.addi(target, mgpu.c(heads.size * i, target.type))
            _store("global", stored_chunk, words, arith.andi(is_owner, is_new))
        _hand_over()

    step(qkv_ref, list(rope_refs), head, is_owner, q_smem, new_smem, list(stored_refs))


@place_new.in_jax
def _place_new(qkv_ref, rope_refs, head, is_owner, q_smem, new_smem, stored_refs, *, heads):
    vectors = qkv_ref[...].reshape(-1, heads.size)
    a, b = jnp.split(vectors.astype(jnp.float32), 2, axis=1)
    cos, sin = (ref[...] for ref in rope_refs)
    rotated = jnp.concatenate([a * cos - b * sin, b * cos + a * sin], 1).astype(vectors.dtype)
    q = lax.dynamic_slice_in_dim(rotated, head * heads.group, heads.group)
    q_smem[...] = jnp.pad(q, ((0, HEADS - heads.group), (0, 0)))
    new = rotated[heads.all + head], vectors[heads.all + heads.stored + head]
    new_smem[...] = jnp.stack(new)

    @pl.when(is_owner)
    def _():
        stored_refs[0][...], stored_refs[1][...] = new


@primitive
def patch(k_smem, v_smem, new_smem, high: jax.Array) -> None:
    """Makes loaded keys and values complete, and values that nothing attends to zero.

    Args:
      k_smem, v_smem: SMEM `[step, size]` with transforms `TILED`.
      new_smem: SMEM `[2, size]`, the new key and value; for row `high`, unless high >= step.
      high: int32 scalar, the last row that is attended to, not negative.
    """
    tiled, scalar = plgpu.RefType(TILED), SCALAR
    rows, size = k_smem.shape

    @plgpu.inline_mgpu(arg_types=(tiled, tiled, plgpu.RefType(), scalar))
    def step(_, k_smem, v_smem, new_smem, high):
        (high,) = high.registers.flat
        thread = arith.remui(mgpu.thread_idx(), const(128))
        k, v = simt.smem_address(k_smem), simt.smem_address(v_smem)
        tiles = const(size // 64)
        row = arith.divui(thread, tiles)
        is_outside = arith.andi(simt.less(high, row), simt.less(row, const(rows)))
        # All eight chunks of the row in one tile, in whatever order.
        first = arith.muli(arith.remui(thread, tiles), const(8))
        start = arith.andi(_chunk_offset(row, first, size), const(-128))
        for chunk in range(8):
            place = arith.addi(arith.addi(v, start), const(16 * chunk))
            _store("shared", place, [const(0)] * 4, is_outside)

        chunks = const(size // 8)
        chunk, is_key = arith.remui(thread, chunks), simt.less(thread, chunks)
        is_mine = arith.andi(simt.less(thread, const(size // 4)), simt.less(high, const(rows)))
        words = mgpu.utils.inline_ptx(
            "mov.b32 $0, 0; mov.b32 $1, 0; mov.b32 $2, 0; mov.b32 $3, 0; "
            "@$5 ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
            arith.addi(simt.smem_address(new_smem), arith.muli(thread, const(16))),
            is_mine,
            result_types=[const(0).type] * 4,
            has_side_effects=True,
        )
        place = arith.addi(arith.select(is_key, k, v), _chunk_offset(high, chunk, size))
        _store("shared", place, words, is_mine)
        _hand_over()

    step(k_smem, v_smem, new_smem, high)


@patch.in_jax
def _patch(k_smem, v_smem, new_smem, high):
    row = jnp.arange(k_smem.shape[0])[:, None]
    key, value = new_smem[...]
    k_smem[...] = jnp.where(row == high, key, k_smem[...])
    v = jnp.where(row == high, value, v_smem[...])
    v_smem[...] = jnp.where(row > high, 0, v)


@primitive
def store_transposed(p: jax.Array, p_smem) -> None:
    """Stores `p: [keys, 8]` (16-bit, WGMMA layout) to SMEM `[8, keys]` with transforms `TILED`."""

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(TILED)))
    def step(_, p, p_smem):
        lane, warp = simt.lane_and_warp()
        key = arith.addi(arith.muli(warp, const(16)), arith.shrui(lane, const(2)))
        head = arith.muli(arith.andi(lane, const(3)), const(2))
        base = arith.addi(
            simt.smem_address(p_smem), arith.muli(arith.andi(key, const(7)), const(2))
        )
        for i, register in enumerate(p.registers.flat):
            tile, half = divmod(i, 2)
            chunk = arith.addi(arith.shrui(key, const(3)), const(half))
            places = []
            for h in (head, arith.addi(head, const(1))):
                swizzled = arith.muli(arith.xori(chunk, h), const(16))
                row = arith.addi(arith.muli(h, const(128)), const(tile * _TILE))
                places.append(arith.addi(base, arith.addi(row, swizzled)))
            mgpu.utils.inline_ptx(
                "{ .reg .b16 even, odd; mov.b32 {even, odd}, $2; "
                "st.shared.b16 [$0], even; st.shared.b16 [$1], odd; }",
                *places,
                mgpu.utils.bitcast(register, const(0).type),
            )
        _hand_over()

    step(p, p_smem)


@store_transposed.in_jax
def _store_transposed(p, p_smem):
    p_smem[...] = p.T


def _equal(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def _chunk_offset(row: ir.Value, chunk: ir.Value, size: int) -> ir.Value:
    """Offset in bytes of a 16-byte chunk of a row of `size` columns in tiled SMEM."""
    tile = arith.addi(
        arith.muli(arith.divui(row, const(8)), const(size // 64)), arith.divui(chunk, const(8))
    )
    row_in_tile = arith.remui(row, const(8))
    place = arith.xori(arith.remui(chunk, const(8)), row_in_tile)
    within = arith.addi(arith.muli(row_in_tile, const(128)), arith.muli(place, const(16)))
    return arith.addi(arith.muli(tile, const(_TILE)), within)


def _store(space: str, address: ir.Value, words: list[ir.Value], active: ir.Value) -> None:
    mgpu.utils.inline_ptx(
        f"st.{space}.v4.b32 [$0], {{$1, $2, $3, $4}};", address, *words, predicate=active
    )


def _first_column(head, number, is_query, heads: Heads) -> ir.Value:
    """Where one of the vectors of `place_new` begins among query, key and value."""
    query = arith.addi(arith.muli(head, const(heads.group)), number)
    before = arith.addi(
        const(heads.all - HEADS * heads.stored), arith.muli(number, const(heads.stored))
    )
    stored = arith.addi(head, before)
    return arith.muli(arith.select(is_query, query, stored), const(heads.size))


def _load_two(ref, offset: ir.Value, distance: int, active) -> list[list[ir.Value]]:
    """Two chunks of 16 bytes, so many bytes apart, in words."""
    address = simt.gmem_address(ref, offset)
    return [simt.load_chunk(address, distance * i, active) for i in (0, 1)]


def _rotate(halves, turns, dtype: ir.Type) -> list[list[ir.Value]]:
    """Rotates 8 features and their partners, both in words, by cosine and sine, in words."""
    f32 = ir.F32Type.get()
    wide = ir.VectorType.get((8,), f32)
    a, b = (arith.extf(wide, _vector(half, dtype)) for half in halves)
    cos, sin = (_vector([*first, *second], f32) for first, second in turns)
    turned = (
        arith.subf(arith.mulf(a, cos), arith.mulf(b, sin)),
        arith.addf(arith.mulf(b, cos), arith.mulf(a, sin)),
    )
    narrow = ir.VectorType.get((8,), dtype)
    return [register_rows.elements(arith.truncf(narrow, x), const(0).type) for x in turned]


def _vector(words: list[ir.Value], dtype: ir.Type) -> ir.Value:
    """Concatenates 32-bit words into a vector of `dtype`."""
    n = len(words) * 32 // mgpu.bitwidth(dtype)
    words = vector.from_elements(ir.VectorType.get((len(words),), words[0].type), words)
    return mgpu.utils.bitcast(words, ir.VectorType.get((n,), dtype))


def _hand_over() -> None:
    """What all lanes have stored to shared memory can be read by a WGMMA, or by any lane."""
    mgpu.utils.inline_ptx("fence.proxy.async.shared::cta;")
    mgpu.warpgroup_barrier()

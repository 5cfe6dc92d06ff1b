"""Code that each lane runs on its own values, inside `plgpu.inline_mgpu`."""

import numpy as np
from jax.experimental.mosaic import gpu as mgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith


def const(value: int) -> ir.Value:
    """An i32 constant."""
    return mgpu.c(value, ir.IntegerType.get_signless(32))


def less(a: ir.Value, b: ir.Value) -> ir.Value:
    """Whether a < b, unsigned."""
    return arith.cmpi(arith.CmpIPredicate.ult, a, b)


def equal(a: ir.Value, b: ir.Value) -> ir.Value:
    return arith.cmpi(arith.CmpIPredicate.eq, a, b)


def thread() -> ir.Value:
    """This thread's number in its warpgroup, i32."""
    return arith.andi(mgpu.thread_idx(), const(127))


def is_from_hopper_on() -> bool:
    """Whether code is made for a Hopper GPU or a later one."""
    return mgpu.utils.get_arch().major >= 9


def lane_and_warp() -> tuple[ir.Value, ir.Value]:
    """This thread's lane in its warp and its warp in the warpgroup, i32."""
    thread = mgpu.thread_idx()
    warp = arith.shrui(thread, const(5))
    return arith.andi(thread, const(31)), arith.andi(warp, const(3))


def is_first_thread() -> ir.Value:
    """Whether this is the first thread of its warpgroup."""
    lane, warp = lane_and_warp()
    return less(arith.addi(lane, warp), const(1))


def broadcast_first(value: ir.Value, scratch: ir.Value) -> ir.Value:
    """Broadcasts the first thread's `value` (i32) to its warpgroup; `scratch`: 4 bytes of SMEM."""
    mgpu.warpgroup_barrier()  # earlier reads of the scratch are done
    mgpu.utils.inline_ptx(
        "@$2 st.shared.b32 [$0], $1;", scratch, value, is_first_thread(), has_side_effects=True
    )
    mgpu.warpgroup_barrier()
    return mgpu.utils.inline_ptx(
        "ld.shared.b32 $0, [$1];", scratch, result_types=value.type, has_side_effects=True
    )


def first_thread_atomic(operation: str, address: ir.Value, operand: ir.Value) -> ir.Value:
    """The first thread of the warpgroup does `atom.OPERATION.u32` on a word of GMEM.

    It gets the word's value before (i32), the other threads get 0.
    """
    # The result is written last: it may lie in the register of an operand.
    return mgpu.utils.inline_ptx(
        f"""{{.reg .b32 before;
            mov.b32 before, 0;
            @$3 atom.global.{operation}.u32 before, [$1], $2;
            mov.b32 $0, before;}}""",
        address,
        operand,
        is_first_thread(),
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )


def gmem_address(ref: ir.Value, offset: ir.Value) -> ir.Value:
    """Address (i64) of the byte at `offset` (i32, unsigned) of a GMEM reference."""
    i64 = ir.IntegerType.get_signless(64)
    base = mgpu.utils.inline_ptx("mov.b64 $0, $1;", mgpu.utils.memref_ptr(ref), result_types=i64)
    return arith.addi(base, arith.extui(i64, offset))


def element_address(
    ref: ir.Value, row: ir.Value, column: ir.Value, size: int
) -> tuple[ir.Value, int]:
    """The address of an element of so many bytes of a GMEM matrix, and the bytes from a row to the
    next."""
    stride = ir.MemRefType(ref.type).get_strides_and_offset()[0][0]
    place = arith.addi(arith.muli(row, const(stride)), column)
    return gmem_address(ref, arith.muli(place, const(size))), stride * size


def smem_address(ref: ir.Value) -> ir.Value:
    """Address (i32) of an SMEM reference."""
    i32 = ir.IntegerType.get_signless(32)
    return mgpu.utils.inline_ptx("mov.b32 $0, $1;", mgpu.utils.memref_ptr(ref), result_types=i32)


def load_shared(address: ir.Value, offset: int) -> ir.Value:
    """Loads a word (i32) of SMEM at `address + offset` (bytes)."""
    return mgpu.utils.inline_ptx(
        f"ld.shared.b32 $0, [$1 + {offset}];",
        address,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
    )


def store_shared(address: ir.Value, offset: int, word: ir.Value) -> None:
    """Stores a word (i32) to SMEM at `address + offset` (bytes)."""
    mgpu.utils.inline_ptx(f"st.shared.b32 [$0 + {offset}], $1;", address, word)


def load_words(address: ir.Value, offset: int, active: ir.Value, n: int = 4) -> list[ir.Value]:
    """Loads `n` (1, 2 or 4) 32-bit words from GMEM at `address + offset` (bytes); if not `active`,
    returns zeros without an access. Nothing may write these words while the kernel runs."""
    results = [f"${i}" for i in range(n)]
    zero = " ".join(f"mov.b32 {result}, 0;" for result in results)
    load = "ld.global.nc.b32" if n == 1 else f"ld.global.nc.v{n}.b32"
    words = mgpu.utils.inline_ptx(
        f"{zero} @${n + 1} {load} {{{', '.join(results)}}}, [${n} + {offset}];",
        address,
        active,
        result_types=[ir.IntegerType.get_signless(32)] * n,
    )
    return list(words)


def load_word(address: ir.Value, offset: int, active: ir.Value) -> ir.Value:
    """Loads a word of GMEM at `address + offset` (bytes); 0, without an access, if not `active`. It
    stays behind what the kernel has waited for."""
    return mgpu.utils.inline_ptx(
        f"mov.b32 $0, 0; @$2 ld.global.b32 $0, [$1 + {offset}];",
        address,
        active,
        result_types=const(0).type,
        has_side_effects=True,
    )


def load_chunk(address: ir.Value, offset: int, active: ir.Value, n: int = 4) -> list[ir.Value]:
    """Loads `n` (2 or 4) words of GMEM at `address + offset` (bytes); zeros, without an access, if
    not `active`. Unlike `load_words`, it stays behind what the kernel has waited for."""
    results = [f"${i}" for i in range(n)]
    zero = " ".join(f"mov.b32 {result}, 0;" for result in results)
    return list(
        mgpu.utils.inline_ptx(
            f"{zero} @${n + 1} ld.global.v{n}.b32 {{{', '.join(results)}}}, [${n} + {offset}];",
            address,
            active,
            result_types=[ir.IntegerType.get_signless(32)] * n,
            has_side_effects=True,
        )
    )


def store_words(ref: ir.Value, place: ir.Value, words: list[ir.Value], active: ir.Value) -> None:
    """Stores 1, 2 or 4 words (i32) to a GMEM reference, from its 32-bit word `place` on, a multiple
    of their number, if `active`."""
    address = gmem_address(ref, arith.muli(place, const(4)))
    operands = ", ".join(f"${i + 1}" for i in range(len(words)))
    width = "" if len(words) == 1 else f".v{len(words)}"
    mgpu.utils.inline_ptx(
        f"st.global{width}.b32 [$0], {{{operands}}};", address, *words, predicate=active
    )


def int_array(words: list[ir.Value], layout) -> mgpu.FragmentedArray:
    """An int32 array of this lane's `words` (i32); a register of `layout` holds one element."""
    one = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
    registers = np.array([mgpu.utils.bitcast(word, one) for word in words], dtype=object)
    return mgpu.FragmentedArray(_registers=registers, _layout=layout.to_mgpu(), _is_signed=True)


def from_lane(word: ir.Value, lane: ir.Value) -> ir.Value:
    """What `word` (i32) is in another lane of the warp."""
    return mgpu.utils.inline_ptx(
        "shfl.sync.idx.b32 $0, $1, $2, 31, -1;",
        word,
        lane,
        result_types=word.type,
        convergent=True,
    )


def barrier_any(x: ir.Value) -> ir.Value:
    """Whether `x` (i1) holds in any lane of the warpgroup; also a barrier for the warpgroup."""
    result = mgpu.utils.inline_ptx(
        """{.reg .pred any;
            barrier.cta.red.or.pred any, $1, 128, $2;
            selp.b32 $0, 1, 0, any;}""",
        mgpu.utils.warpgroup_barrier_idx(sync=False),
        x,
        result_types=ir.IntegerType.get_signless(32),
        has_side_effects=True,
        convergent=True,
    )
    return arith.cmpi(arith.CmpIPredicate.ne, result, const(0))


def warp_sum(x: ir.Value) -> ir.Value:
    """Sum of `x` (i32) over the lanes of the warp."""
    return mgpu.utils.redux(x, const(-1), mgpu.utils.ReductionKind.ADD)


def warp_max(x: ir.Value) -> ir.Value:
    """The largest `x` (i32, unsigned) of the lanes of the warp."""
    return mgpu.utils.redux(x, const(-1), mgpu.utils.ReductionKind.UMAX)


def warp_min(x: ir.Value) -> ir.Value:
    """The smallest `x` (i32, unsigned) of the lanes of the warp."""
    return mgpu.utils.redux(x, const(-1), mgpu.utils.ReductionKind.UMIN)


def inclusive_sum(x: ir.Value, lane: ir.Value) -> ir.Value:
    """Sum of `x` (i32) over the lanes of the warp up to this one."""
    for distance in (1, 2, 4, 8, 16):
        below = mgpu.utils.inline_ptx(
            f"shfl.sync.up.b32 $0, $1, {distance}, 0, -1;",
            x,
            result_types=ir.IntegerType.get_signless(32),
            convergent=True,
        )
        x = arith.addi(x, arith.select(less(lane, const(distance)), const(0), below))
    return x


def store_chunk(address: ir.Value, offset: int, words: list[ir.Value], active: ir.Value) -> None:
    """Stores 1, 2 or 4 words to GMEM at `address + offset` (bytes) if `active`."""
    operands = ", ".join(f"${i + 1}" for i in range(len(words)))
    width = "" if len(words) == 1 else f".v{len(words)}"
    mgpu.utils.inline_ptx(
        f"st.global{width}.b32 [$0 + {offset}], {{{operands}}};", address, *words, predicate=active
    )

"""The whole feed-forward block for few tokens (decoding), where the bytes of weights are the cost.

Two kernels. The gate kernel reads all of w_gate, once: each warpgroup multiplies 16 neurons with
all tokens by `mma.sync`, on operands that go straight from memory into registers. The row kernel
reads only the rows of w_up and w_down that a token needs: the blocks of a cluster share out the
token's non-zeros evenly, walk them (`gather.gather_ffn`) and send each other their sums, which are
added in a fixed order. There is no capacity: every input is exact, at 4 D bytes of weights, mostly
from L2, for each non-zero.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mgpu
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from pallas_kernels import cluster, gather, operands, simt

MAX_TOKENS = 64
_BLOCKS = 8  # of a cluster, as many as the hardware promises to run together
_NEURONS = 16  # rows of an mma.sync
_STEP = 128  # columns that the four warps of the gate kernel take at a time, 32 each


@dataclasses.dataclass(frozen=True)
class SmallMConfig:
    """Schedule of `small_m_ffn` on Hopper.

    Attributes:
      gate_loads: 16-byte loads that a lane of the gate kernel issues at a time; two such groups are
        in flight.
      row_loads: 16-byte loads from each weight matrix that a lane of the row kernel keeps in
        flight, or one row's worth where that is more; half of it from 17 tokens on, where more
        blocks on an SM serve better.
    """

    gate_loads: int = 12
    row_loads: int = 8


def small_m_ffn_reference(
    x: jax.Array, w_gate: jax.Array | None, w_up: jax.Array, w_down: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Pure-JAX meaning of `small_m_ffn`."""
    product = functools.partial(
        jnp.einsum, "md,hd->mh", preferred_element_type=jnp.float32, precision="highest"
    )
    g = jnp.maximum(product(x, w_up if w_gate is None else w_gate).astype(x.dtype), 0)
    u = 1.0 if w_gate is None else product(x, w_up)
    h = jnp.where(g != 0, g.astype(jnp.float32) * u, 0)
    fired = jnp.any(g != 0, axis=0)
    used = jnp.where(fired[:, None], w_down, 0).astype(jnp.float32)
    y = jnp.dot(h, used, precision="highest")
    nnz = jnp.sum(g != 0, axis=1, dtype=jnp.int32)
    return y.astype(x.dtype), nnz, jnp.sum(jnp.abs(h), axis=1), fired


def small_m_ffn(
    x: jax.Array,
    w_gate: jax.Array | None,
    w_up: jax.Array,
    w_down: jax.Array,
    *,
    config: SmallMConfig = SmallMConfig(),
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Computes `y = (relu(x @ w_gate^T) * (x @ w_up^T)) @ w_down` for at most 64 tokens.

    The non-gated form is `y = relu(x @ w_up^T) @ w_down`. The gate is rounded to the dtype of x,
    all else is float32 until y is rounded; sums have a fixed order. Behind a gate of zero, no row
    of w_up or w_down is read (in the non-gated form, of w_down).

    Args:
      x: `[M, D]`, bfloat16 or float16, M from 1 to 64, D a multiple of 64 from 128 to 8192.
      w_gate: `[H, D]`, H a multiple of 128 up to 65536. None for the non-gated form.
      w_up: `[H, D]`.
      w_down: `[H, D]`.
      config: schedule.

    Returns:
      y: `[M, D]`.
      nnz: int32 `[M]`, the number of non-zeros of the gate.
      l1: float32 `[M]`, the sum of the magnitudes of the hidden activation.
      fired: bool `[H]`, whether a neuron's gate is non-zero for any token.

    Raises:
      ValueError: if a shape or dtype is not one of these.
    """
    operands.check_weight("w_up", w_up)
    h, d = w_up.shape
    if x.ndim != 2 or not 1 <= x.shape[0] <= MAX_TOKENS:
        raise ValueError(f"x must be [M, D] with M from 1 to {MAX_TOKENS}, got {list(x.shape)}")
    m = x.shape[0]
    operands.check_array("x", x, (m, d), w_up.dtype)
    operands.check_array("w_gate", w_gate, (h, d), w_up.dtype)
    operands.check_array("w_down", w_down, (h, d), w_up.dtype)

    gated = w_gate is not None
    gate = _gate(x, w_gate if gated else w_up, config)
    loads = config.row_loads if m <= 16 else config.row_loads // 2
    batch = max(1, loads // gather.row_steps(d))
    width = gather.row_width(d)
    kernel = plgpu.kernel(
        _row_kernel,
        out_type=(
            jax.ShapeDtypeStruct((m, width), x.dtype),
            jax.ShapeDtypeStruct((m,), jnp.int32),
            jax.ShapeDtypeStruct((m,), jnp.float32),
        ),
        scratch_types=dict(
            entries=plgpu.SMEM((h // _BLOCKS + 2 * batch,), jnp.uint32),
            counts=plgpu.SMEM((4,), jnp.int32),
            sums=plgpu.SMEM((2, batch, 4), jnp.float32),
            y_parts=plgpu.SMEM((_BLOCKS, width // _BLOCKS), jnp.float32),
            l1_parts=plgpu.SMEM((_BLOCKS,), jnp.float32),
            arrived=plgpu.SMEM((2,), jnp.uint32),
        ),
        grid=(m,),
        grid_names=("token",),
        cluster=(_BLOCKS,),
        cluster_names=("block",),
        kernel_name="small_m_row",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    y, nnz, l1 = kernel(gate, *((x, w_up) if gated else (None, None)), w_down)
    return y[:, :d], nnz, l1, jnp.any(gate != 0, axis=1).ravel()


def _gate(x, w_gate, config):
    """`relu(x @ w_gate^T)`, neurons in groups: `[H / 16, M rounded up to a multiple of 8, 16]`."""
    tokens = pl.cdiv(x.shape[0], 8) * 8
    groups = w_gate.shape[0] // _NEURONS
    kernel = plgpu.kernel(
        functools.partial(_gate_kernel, loads=config.gate_loads),
        out_type=jax.ShapeDtypeStruct((groups, tokens, _NEURONS), x.dtype),
        scratch_types=dict(parts=plgpu.SMEM((4, tokens, _NEURONS), jnp.float32)),
        grid=(groups,),
        grid_names=("group",),
        kernel_name="small_m_gate",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(x, w_gate)


def _gate_kernel(x, w_gate, gate, *, parts, loads):
    group = lax.axis_index("group")
    multiply(x, w_gate.at[pl.ds(group * _NEURONS, _NEURONS)], parts, loads)
    total = parts[0] + parts[1] + parts[2] + parts[3]
    gate[group] = jnp.maximum(total, 0).astype(gate.dtype)


def _row_kernel(
    gate, x, w_up, w_down, y, nnz, l1, *, entries, counts, sums, y_parts, l1_parts, arrived
):
    token, block = lax.axis_index("token"), lax.axis_index("block")
    x_row = None if x is None else gather.widen(gather.load_row(x.at[token], jnp.bool(True)))
    cluster.expect_parts(y_parts, l1_parts, arrived)
    token_nnz = collect_share(gate, token, block, entries, counts)
    count = (token_nnz + _BLOCKS - 1 - block) // _BLOCKS
    y_part, l1_part = gather.gather_ffn(x_row, entries, count, w_up, w_down, sums)
    cluster.send_parts(y_part, l1_part, block, y_parts, l1_parts, arrived)
    cluster.wait_for_parts(arrived)

    def total(parts):
        return functools.reduce(jnp.add, [parts[b] for b in range(_BLOCKS)])

    width = y_parts.shape[1]
    y[token, pl.ds(block * width, width)] = total(y_parts).astype(y.dtype)

    @pl.when(block == 0)
    def _():
        nnz[token] = token_nnz
        l1[token] = total(l1_parts)


def multiply(x_ref, w_ref, parts_ref, loads: int) -> None:
    """Multiplies 16 neurons with all tokens.

    Args:
      x_ref: GMEM `[M, D]`.
      w_ref: GMEM `[16, D]`.
      parts_ref: SMEM, float32 `[4, tokens, 16]`, tokens a multiple of 8 from M: becomes what each
        warp summed over its share of the columns, zeros past M.
      loads: 16-byte loads that a lane issues at a time.
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),) * 3)
    def step(_, x_ref, w_ref, parts_ref):
        const, less = simt.const, simt.less
        m, d = ir.MemRefType(x_ref.type).shape
        dtype = ir.MemRefType(x_ref.type).element_type
        _, tokens, _ = ir.MemRefType(parts_ref.type).shape
        lane, warp = simt.lane_and_warp()
        row, quarter = arith.shrui(lane, const(2)), arith.andi(lane, const(3))
        # Lane (row, quarter) loads columns 32 i + 8 quarter + {0, ..., 7} of its rows of both
        # operands. mma.sync means others by these registers, but a permutation common to both
        # operands leaves the sum over columns as it is.
        start = arith.addi(arith.muli(warp, const(_STEP // 4)), arith.muli(quarter, const(8)))
        row_start = arith.muli(row, const(d))
        is_token = [less(row, const(m - t)) for t in range(0, m, 8)]
        unroll = max(1, loads // (2 + len(is_token)))

        def load(i):
            """Operands of the steps `i * unroll + {0, ..., unroll - 1}`."""
            column = arith.addi(start, arith.muli(i, const(unroll * _STEP)))
            offset = arith.muli(arith.addi(row_start, column), const(2))
            w_address = simt.gmem_address(w_ref, offset)
            x_address = simt.gmem_address(x_ref, offset)
            steps = []
            for k in range(0, unroll * _STEP, _STEP):
                inside = less(arith.addi(column, const(k)), const(d))
                w = [simt.load_words(w_address, 2 * (n * d + k), inside) for n in (0, 8)]
                x = [
                    simt.load_words(x_address, 2 * (8 * b * d + k), arith.andi(inside, predicate))
                    for b, predicate in enumerate(is_token)
                ]
                steps.append((w, x))
            return steps

        rounds = const(pl.cdiv(d, unroll * _STEP))
        zeros = [[mgpu.c(0.0, ir.F32Type.get())] * 4] * len(is_token)

        @mgpu.utils.fori(rounds, (load(const(0)), zeros))
        def loop(i, carry):
            steps, acc = carry
            following = load(arith.addi(i, const(1)))
            for w, x in steps:
                for k in (0, 2):
                    a = [w[0][k], w[1][k], w[0][k + 1], w[1][k + 1]]
                    acc = [_mma(c, a, b[k : k + 2], dtype) for c, b in zip(acc, x, strict=True)]
            return following, acc

        _, acc = loop.results
        # The lane has neurons row + {0, 8} of tokens 8 b + 2 quarter + {0, 1}.
        token = arith.addi(arith.muli(warp, const(tokens)), arith.muli(quarter, const(2)))
        place = arith.addi(arith.muli(token, const(_NEURONS)), row)
        place = arith.addi(simt.smem_address(parts_ref), arith.muli(place, const(4)))
        for b, c in enumerate(acc):
            for i, value in enumerate(c):
                offset = 4 * (_NEURONS * (8 * b + i % 2) + 8 * (i // 2))
                mgpu.utils.inline_ptx(f"st.shared.f32 [$0 + {offset}], $1;", place, value)
        mgpu.warpgroup_barrier()

    step(x_ref, w_ref, parts_ref)


def _mma(c: list, a: list, b: list, dtype: ir.Type) -> list[ir.Value]:
    """`c + a @ b` of one `mma.sync` tile, c [16, 8], a [16, 16], b [16, 8], in lane registers."""
    d = mgpu.utils.inline_ptx(
        f"mma.sync.aligned.m16n8k16.row.col.f32.{dtype}.{dtype}.f32 "
        "{$0, $1, $2, $3}, {$4, $5, $6, $7}, {$8, $9}, {$10, $11, $12, $13};",
        *a,
        *b,
        *c,
        result_types=[ir.F32Type.get()] * 4,
        convergent=True,
    )
    return list(d)


def collect_share(gate_ref, token, share, entries_ref, counts_ref) -> jax.Array:
    """Lists every eighth non-zero of one token, from the `share`-th on, in a fixed order.

    Args:
      gate_ref: GMEM `[H / 16, tokens, 16]`, 16-bit.
      token: int32 scalar.
      share: int32 scalar, from 0 to 7.
      entries_ref: SMEM, uint32, at least H / 8: becomes words `neuron | bits << 16`.
      counts_ref: SMEM, int32 `[4]`, workspace.

    Returns:
      int32 scalar, the number of all non-zeros of the token.
    """

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(), gather.SCALAR, gather.SCALAR, plgpu.RefType(), plgpu.RefType()),
        return_type=plgpu.ShapeDtypeStruct((), jnp.int32, layout=gather.SCALAR),
    )
    def step(_, gate_ref, token, share, entries_ref, counts_ref):
        ptx, const, less = mgpu.utils.inline_ptx, simt.const, simt.less
        i32 = ir.IntegerType.get_signless(32)
        (token,), (share,) = token.registers.flat, share.registers.flat
        groups, tokens, _ = ir.MemRefType(gate_ref.type).shape
        lane, warp = simt.lane_and_warp()
        thread = arith.addi(arith.muli(warp, const(32)), lane)

        # Each lane takes every 128th chunk of 8 neurons, half a group.
        row = arith.addi(arith.muli(arith.shrui(thread, const(1)), const(tokens)), token)
        half = arith.muli(arith.andi(thread, const(1)), const(8))
        element = arith.addi(arith.muli(row, const(_NEURONS)), half)
        address = simt.gmem_address(gate_ref, arith.muli(element, const(2)))
        pairs, count = [], const(0)
        for chunk in range(0, 2 * groups, 128):
            inside = less(thread, const(2 * groups - chunk))
            offset = chunk * tokens * _NEURONS
            for i, pair in enumerate(simt.load_words(address, offset, inside)):
                ones = ptx(
                    "{ .reg .b32 ones; min.u16x2 ones, $1, $2; popc.b32 $0, ones; }",
                    pair,
                    const(0x00010001),
                    result_types=i32,
                )
                pairs.append((8 * chunk + 2 * i, pair, ones))
                count = arith.addi(count, ones)

        end = simt.inclusive_sum(count, lane)
        counts = simt.smem_address(counts_ref)
        mine = arith.addi(counts, arith.muli(warp, const(4)))
        ptx("st.shared.b32 [$0], $1;", mine, end, predicate=less(const(30), lane))
        mgpu.warpgroup_barrier()
        counts = ptx(
            "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];",
            counts,
            result_types=[i32] * 4,
            has_side_effects=True,
        )
        rank, total = arith.subi(end, count), const(0)
        for w, warp_count in enumerate(counts):
            rank = arith.select(less(const(w), warp), arith.addi(rank, warp_count), rank)
            total = arith.addi(total, warp_count)

        entries, first = simt.smem_address(entries_ref), arith.muli(thread, const(8))
        for neuron, pair, ones in pairs:
            with mgpu.utils.when(less(const(0), pair)):  # few pairs are, so few warps enter
                own_rank = rank
                for i in range(2):
                    bits = arith.andi(arith.shrui(pair, const(16 * i)), const(0xFFFF))
                    is_entry = less(const(0), bits)
                    owner = arith.remui(own_rank, const(_BLOCKS))
                    is_mine = arith.cmpi(arith.CmpIPredicate.eq, owner, share)
                    place = arith.muli(arith.divui(own_rank, const(_BLOCKS)), const(4))
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

    return step(gate_ref, token, share, entries_ref, counts_ref)

"""A sparse feed-forward block behind its gate, for up to 64 tokens and any pattern.

If few gates are active, a cluster of thread blocks serves a token (`token_rows`). If many are, each
subcluster multiplies densely (`token_block`): first those tiles of 64 neurons with w_up that the
gate's kernel has not multiplied, then, behind a barrier across the grid if there were any, with
w_down. The numbers of active gates decide, which `token_gate.gate` has counted on the
device; sums have a fixed order either way.

The kernel is launched while the gate's still runs (programmatic dependent launch); if many gates
are active, when w_up has been multiplied.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.common import params, register_rows
from pallas_kernels.hopper.common.dependent_launch import await_previous, launch_next
from pallas_kernels.hopper.decode import (
    active_counts,
    active_gates,
    cluster,
    shares,
    token_columns,
    token_gate,
    token_ring,
    token_rows,
    votes,
    words,
)
from pallas_kernels.hopper.decode.gate import Gate
from pallas_kernels.hopper.decode.token_block import TokenBlock
from pallas_kernels.hopper.decode.token_ring import COLUMNS, PARTS, Matrices, Product, TokenRing
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.rectifiers import RELU, Rectifier
from pallas_kernels.weights import Weights

# Rows are read one by one up to so many active gates. A thread block then takes 16 rounds of 8
# rows, about as long as its part of a dense product takes (D = 2048, H = 5632, H100).
MOST_ACTIVE_OF_A_TOKEN = 512
MOST_ACTIVE = 8192  # of all tokens together
_ON_SM = 2  # thread blocks that share an SM: their registers allow no third one
# Up to so many tokens two subclusters serve one, so that most tokens take a single round of rows.
# With more, the GPU would not hold all thread blocks at once.
_FEW = 16


class Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
      gate: `[M, H]`, M a multiple of 8 up to 64.
      x: `[M, D]`, or of fewer than 8 rows; like the rest of the stream, each thread block of the
        gate's kernel has waited for it before it let this one start.
      up: one matrix, `[layers, H, D]`; None without a gate projection, where the gate is the
        activation.
      down: one matrix, `[layers, H, D]`, of 16 bits.
      layer: int32 `[1]`.
      squares: of `Stream`, if x is the scaled stream of a norm.
    """

    gate: Any
    x: Any
    up: Matrices | None
    down: Matrices
    layer: Any
    squares: Any


@dataclasses.dataclass(frozen=True)
class _Stores:
    """What is done with results; each function begins with the further operands, and the results.

    Attributes:
      row: (..., layer, token, `token_rows.Share`), called while the rows are on their way. Returns
        what is called with that part of y and with the token's l1.
      columns: (..., layer, first, y) of 16 columns of all tokens, as in `token_columns`.
      hidden: (..., first, h), likewise; only of a dense product.
    """

    row: Callable
    columns: Callable
    hidden: Callable = lambda *_: None


def multiply(
    gate: Gate,
    x: jax.Array,
    weights: Weights,
    counts: jax.Ref,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
) -> tuple[jax.Array, jax.Array | None]:
    """`(gate * (x @ w_up^T)) @ w_down`, or `gate @ w_down` without a gate projection.

    Args:
      gate: from `token_gate.gate`, of M tokens and H neurons.
      x: `[M, D]`, M a multiple of 8 up to 64; or fewer than 8, and those of the gate are padding.
      weights: `[1, H, D]` each; up may be `Quantised`, and x is then rounded to 8-bit floats, too.
      counts: of one layer, from `token_gate.gate`.
      rectifier: what made the gate; it may pass `x @ w_up^T` through a ReLU.
      batch: the first so many tokens are computed.

    Returns:
      y: `[batch, row_width(D)]`, columns past D are padding.
      l1: float32 `[M, H / 16]`, in parts, the sum of the magnitudes of the hidden activation; of
        padding it is undefined. None without a gate projection, where the gate is the activation.
    """
    y = jax.ShapeDtypeStruct((batch, register_rows.row_width(x.shape[1])), x.dtype)
    l1 = None if gate.l1 is None else in_place.mutable(gate.l1)

    def row(refs, outs, layer, token, share):
        del layer

        def store(y, l1):
            outs[0][token, share.columns] = y.astype(x.dtype)
            for parts in refs:
                share.store_total(parts.at[token], jnp.where(share.number == 0, l1, 0.0))

        return store

    def columns(_, outs, layer, first, y):
        del layer
        token_columns.store(outs[0], first, y)

    def hidden(refs, _, first, h):
        token_columns.store_sums(refs[0], first // token_columns.COLUMNS, jnp.abs(h))

    operands = gate, x, weights, jnp.zeros(1, jnp.int32), None
    further, stores = [] if l1 is None else [l1], _Stores(row, columns, hidden)
    (y,) = _call("token_ffn", operands, counts, further, [y], batch, 0.0, stores, rectifier)
    return y, None if l1 is None else in_place.contents(l1)


def add(
    gate: Gate,
    stream: Stream,
    weights: Weights,
    layer: jax.Array,
    counts: jax.Ref,
    scale: jax.Array,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    eps: float,
) -> Stream:
    """Adds a block's output to the residual stream: `x + (gate * (norm(x) @ w_up^T)) @ w_down`.

    Args:
      gate: from `token_gate.gate`, of M tokens and H neurons.
      stream: of M tokens, a multiple of 8 up to 64; D a multiple of 1024.
      weights: `[layers, H, D]` each; up may be `Quantised`, and the scaled stream is then rounded
        to 8-bit floats, too.
      layer: int32 `[1]`.
      counts: from `token_gate.gate`.
      scale: `[layers, D]`, of the norm that comes next.
      rectifier: what made the gate; it may pass `norm(x) @ w_up^T` through a ReLU.
      batch: the first so many tokens are computed; what the others hold afterwards is undefined.
      eps: of the norm.

    Returns:
      The stream in front of that norm.
    """
    tokens, d = stream.x.shape
    x = jax.ShapeDtypeStruct((tokens, d), stream.x.dtype)
    outs = x, x, jax.ShapeDtypeStruct((tokens, d // token_columns.COLUMNS), jnp.float32)

    def columns(refs, outs, layer, first, y):
        (before, scale), written = refs, Stream(*outs)
        after = (token_columns.load(before, first, tokens) + y).astype(x.dtype)
        token_columns.store(written.x, first, after)
        after = after.astype(jnp.float32)
        factor = token_columns.load(scale.at[layer], first, tokens)
        token_columns.store(written.scaled, first, after * factor)
        token_columns.store_sums(written.squares, first // token_columns.COLUMNS, after * after)

    def row(refs, outs, layer, token, share):
        (before, scale), written = refs, Stream(*outs)
        before = token_rows.load_now(before.at[token, share.columns])
        factor = token_rows.load_now(scale.at[layer, share.columns])

        def store(y, _):
            after = (before + y).astype(x.dtype)
            written.x[token, share.columns] = after
            after = after.astype(jnp.float32)
            written.scaled[token, share.columns] = (after * factor).astype(x.dtype)
            share.store_total(written.squares.at[token], share.total(after * after))

        return store

    operands = gate, stream.scaled, weights, layer, stream.squares
    further, stores = in_place.barrier((stream.x, scale)), _Stores(row, columns)
    y = _call("token_add_ffn", operands, counts, further, outs, batch, eps, stores, rectifier)
    return Stream(*y)


class Cut(NamedTuple):
    """How the work is cut.

    Attributes:
      rings: the dense products, with w_up if there is a gate projection, and with w_down.
      subclusters: of a cluster.
      dense_clusters: clusters that multiply densely, and wait for each other.
      memory: the shared memory of a thread block, a pytree by the arguments of the kernel.
    """

    rings: list[TokenRing]
    subclusters: int
    dense_clusters: int
    memory: dict[str, Any]

    @classmethod
    def of(cls, gate: jax.Array, x: jax.Array, weights: Weights, batch: int) -> "Cut":
        """For operands as of `multiply` and `add`; `gate` are its values."""
        # The blocks of one subcluster, of which each has more neurons, may not find enough memory.
        choices = (2,) if batch <= _FEW else (1, 2)
        cuts = (cls._of(gate, x, weights, n, is_few=batch <= _FEW) for n in choices)
        return next(cut for cut in cuts if cut.dense_clusters)

    @classmethod
    def _of(cls, gate, x, weights, subclusters, *, is_few) -> "Cut":
        (_, h), d, blocks = gate.shape, x.shape[1], subclusters * PARTS
        scratch = token_rows.scratch(d)
        # Memory stands still less if a subcluster's two tiles of w_up are loaded at once. With more
        # tokens they leave too little room for stages.
        waiting = token_ring.most_waiting(scratch, _ON_SM, blocks)
        is_two = is_few and h > waiting * subclusters * COLUMNS
        rings = _rings(x, gate, weights, token_ring.size(scratch), is_two)
        memory = dict(
            memory=plgpu.RefUnion(*(r.memory() for r in rings), token_rows.memory(h, d, blocks)),
            scratch=scratch,
            parts=rings[0].parts(),
            arrived=plgpu.SMEM((4,), jnp.uint32),
        )
        clusters = pl.cdiv(max(h, d) // COLUMNS, subclusters)
        clusters = min(clusters, token_ring.most_waiting(memory, _ON_SM, blocks))
        return cls(rings, subclusters, clusters, memory)

    @property
    def up(self) -> TokenRing | None:
        """The dense product with w_up, if there is one."""
        return self.rings[0] if len(self.rings) > 1 else None


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How the kernel works.

    Attributes:
      cut: of the work.
      batch: tokens.
      further: number of operands of `stores`.
      eps: of the norm.
      stores: what is done with results.
      rectifier: what made the gate.
    """

    cut: Cut
    batch: int
    further: int
    eps: float
    stores: _Stores
    rectifier: Rectifier


def _call(name, operands, counts, further, outs, batch, eps, stores, rectifier):
    (gate, hidden, *_), x, weights, layer, squares = operands
    cut = Cut.of(gate, x, weights, batch)
    plan = _Plan(cut, batch, len(further), eps, stores, rectifier)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=outs,
        scratch_types=dict(**cut.memory, here=[r.barriers() for r in cut.rings]),
        grid=(max(batch, cut.dense_clusters),),
        grid_names=("tile",),
        cluster=(cut.subclusters, PARTS),
        cluster_names=("subcluster", "part"),
        kernel_name=name,
        compiler_params=params.UNORDERED,
    )
    matrices = [None if w is None else Matrices.of((w,)) for w in (weights.linear, weights.down)]
    operands = in_place.barrier(Operands(gate, x, *matrices, layer, squares))
    hidden = None if hidden is None else in_place.mutable(hidden)
    return in_place.barrier(kernel(operands, hidden, counts, *further))


def _rings(x, gate, weights, reserved, is_two):
    """Of `Cut`; they leave so many bytes of shared memory for other things."""
    options = dict(on_sm=_ON_SM, reserved=reserved)
    down = TokenRing.of(gate, (weights.down,), k_axis=1, **options)
    if weights.linear is None:
        return [down]
    linear = (1 + is_two) * (weights.linear,)
    up = TokenRing.of(x, linear, k_axis=2, side_by_side=False, **options)
    sums = token_ring.size(up.parts()) - token_ring.size(down.parts())
    return [up, dataclasses.replace(down, reserved=reserved + sums)]


def _kernel(operands, hidden, counts, *refs, memory, scratch, here, parts, arrived, plan):
    further, outs, memory = refs[: plan.further], refs[plan.further :], list(memory)
    number, tile, tokens = operands.layer[0], lax.axis_index("tile"), len(operands.gate)
    is_row, token = tile < plan.batch, jnp.minimum(tile, plan.batch - 1)
    cluster.prepare(arrived)
    rank = lax.axis_index("subcluster") * PARTS + lax.axis_index("part")
    share = token_rows.Share.of(rank, plan.cut.subclusters * PARTS, operands.x.shape[1], scratch)
    x_row = None if plan.cut.up is None else _load_x(operands, token, is_row, scratch, plan)
    store_row = plan.stores.row(further, outs, number, token, share)
    launch_next()
    await_previous()
    tiles = operands.gate.shape[1] // COLUMNS
    of_tiles = pl.ds(active_counts.column(0), tiles)
    numbers_of_tokens = active_gates.load(counts.at[number, pl.ds(1, tokens // 4), of_tiles])
    if plan.cut.up is not None:
        votes_of_tiles = words.load(counts.at[number, 0, of_tiles])
    # While those are on their way, active gates are found as if they were few.
    gate = operands.gate.at[token]
    found = shares.find(gate, is_row, scratch["counts"])
    limits = dict(most=MOST_ACTIVE, most_of_a_token=MOST_ACTIVE_OF_A_TOKEN)
    of_warps = parts.at[0, 0, pl.ds(0, 4)]  # free until a product sends its sums
    is_sparse = active_gates.are_few(numbers_of_tokens, tiles, of_warps, **limits)

    @pl.when(is_sparse & is_row)
    def _():
        weights, shared = _of_layer(operands, number), (scratch, memory[-1], arrived)
        read = x_row, gate, found, share
        store_row(*token_rows.sum_rows(*read, *weights, *shared, plan.rectifier))

    @pl.when(~is_sparse & (tile < plan.cut.dense_clusters))
    def _():
        smem = [
            dict(ring=m, here=b, parts=parts.at[pl.ds(0, r.sums)], arrived=arrived)
            for r, m, b in zip(plan.cut.rings, memory[:-1], here, strict=True)
        ]
        block = _block(operands, hidden, number, smem, plan)
        if plan.cut.up is None:
            block.fetch_down()
        else:
            missing = votes.Missing.of(votes_of_tiles, plan.cut.up.tiles)
            arrivals = counts.at[number, 0, active_counts.Launch.FFN]
            store = _store_hidden(operands, hidden, further, outs, plan)
            block.multiply_up(missing, arrivals, store)
        block.multiply_down(functools.partial(plan.stores.columns, further, outs, number))


def _load_x(operands, token, is_row, scratch, plan):
    squares = None if operands.squares is None else operands.squares.at[token]
    options = dict(is_8_bits=plan.cut.up.is_8_bits, eps=plan.eps)
    return token_rows.load_x(operands.x.at[token], squares, is_row, scratch, **options)


def _of_layer(operands, number):
    """w_up, the scales of its rows, and w_down; None for what there is not."""
    w_down = operands.down.values[0].at[number]
    if operands.up is None:
        return None, None, w_down
    scale = operands.up.scales[0].at[number] if operands.up.scales else None
    return operands.up.values[0].at[number], scale, w_down


def _block(operands, hidden, number, smem, plan):
    """The dense feed-forward block. Subclusters take turns with tiles of neurons, then columns."""
    subcluster = lax.axis_index("subcluster")
    first = lax.axis_index("tile") * plan.cut.subclusters
    stride = plan.cut.dense_clusters * plan.cut.subclusters

    def product(ring, x, matrices, smem):
        return Product(ring, x, matrices, number, (), smem, subcluster * PARTS)

    up, activation = None, operands.gate
    if plan.cut.up is not None:
        up = product(plan.cut.up, operands.x, operands.up.repeated(plan.cut.up.sums), smem[0])
        activation = hidden
    down = product(plan.cut.rings[-1], activation, operands.down, smem[-1])
    return TokenBlock(up, down, first, stride)


def _store_hidden(operands, hidden, further, outs, plan):
    """What stores the hidden activation of 16 neurons, given their first and their up."""
    tokens, d, scale = len(operands.gate), operands.x.shape[1], 1.0
    if operands.squares is not None:
        scale = token_columns.inverse_rms(operands.squares, d, plan.eps)

    def store(first, up):
        g = token_columns.load(operands.gate, first, tokens)
        h = token_gate.hidden(g, up * scale, plan.rectifier)
        token_columns.store(hidden, first, h)
        plan.stores.hidden(further, outs, first, h)

    return store

"""A sparse block behind its gate, for up to 64 tokens and any pattern.

If few gates are open, a cluster of four blocks serves a token: the blocks share out its open gates,
walk the rows of w_up and w_down (`gather.gather_ffn`) and send each other their sums. If many are,
the clusters multiply densely (`frames.token_ring`): first with w_up, a tile of 64 neurons each
after the other, then, behind a barrier across the grid, with w_down. The numbers of open gates
decide, which `token_product.gate` has counted on the device; sums have a fixed order either way.

The kernel is launched while the gate's still runs (programmatic dependent launch).
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
from pallas_kernels.hopper.device import (
    cluster,
    gather,
    grid,
    open_gates,
    round_tokens,
    shares,
    token_columns,
)
from pallas_kernels.hopper.frames import token_ring
from pallas_kernels.hopper.frames.token_ring import PARTS, Matrices, Product, TokenRing
from pallas_kernels.layouts.rectifiers import RELU, Rectifier
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.weights import Weights

# Rows are read one by one up to so many open gates. A block then takes 16 rounds of 8 rows, about
# as long as its part of a dense product takes (D = 2048, H = 5632, H100).
MOST_OPEN_OF_A_TOKEN = 512
MOST_OPEN = 8192  # of all tokens together
_ROW_LOADS = 8  # 16-byte loads from each matrix that a lane keeps in flight, or one row's
_ON_SM = 2  # blocks that share an SM: their registers allow no third one


class Operands(NamedTuple):
    """What the kernel reads.

    Attributes:
      gate: `[M, H]`, M a multiple of 8 up to 64.
      x: `[M, D]`; the gate's kernel has waited for it.
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
      row: (..., layer, token, columns, y, l1) of a part of a token's row.
      columns: (..., layer, first, y) of 16 columns of all tokens, as in `token_columns`.
      hidden: (..., first, h), likewise; only of a dense product.
    """

    row: Callable
    columns: Callable
    hidden: Callable = lambda *_: None


def multiply(
    gate: jax.Array,
    x: jax.Array,
    weights: Weights,
    counts: jax.Ref,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
) -> tuple[jax.Array, jax.Array | None]:
    """`(gate * (x @ w_up^T)) @ w_down`, or `gate @ w_down` without a gate projection.

    Args:
      gate: `[M, H]`, not negative, from `token_product.gate`.
      x: `[M, D]`, M a multiple of 8 up to 64.
      weights: `[1, H, D]` each; up may be `Quantised`, and x is then rounded to 8-bit floats, too.
      counts: of one layer, from `token_product.gate`; its last column was zero.
      rectifier: what made the gate; it may pass `x @ w_up^T` through a ReLU.
      batch: the first so many tokens are computed; what the others hold afterwards is undefined.

    Returns:
      y: `[M, row_width(D)]`, columns past D are padding.
      l1: float32 `[M, H / 16]`, in parts, the sum of the magnitudes of the hidden activation; None
        without a gate projection, where the gate is the activation.
    """
    (tokens, h), d = gate.shape, x.shape[1]
    outs = [jax.ShapeDtypeStruct((tokens, gather.row_width(d)), x.dtype)]
    if weights.linear is not None:
        outs.append(jax.ShapeDtypeStruct((tokens, h // token_columns.COLUMNS), jnp.float32))

    def row(_, outs, layer, token, columns, y, l1):
        del layer
        outs[0][token, columns] = y.astype(x.dtype)
        share = lax.axis_index("part")
        for l1_parts in outs[1:]:
            token_columns.store_total(l1_parts.at[token], share, jnp.where(share == 0, l1, 0.0))

    def columns(_, outs, layer, first, y):
        del layer
        token_columns.store(outs[0], first, y)

    def hidden(_, outs, first, h):
        token_columns.store_sums(outs[1], first // token_columns.COLUMNS, jnp.abs(h))

    operands = gate, x, weights, jnp.zeros(1, jnp.int32), None
    stores = _Stores(row, columns, hidden)
    y, *l1 = _call("token_ffn", operands, counts, (), outs, batch, 0.0, stores, rectifier)
    return y, l1[0] if l1 else None


def add(
    gate: jax.Array,
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
      gate: `[M, H]`, not negative, from `token_product.gate`.
      stream: of M tokens, a multiple of 8 up to 64; D a multiple of 1024.
      weights: `[layers, H, D]` each; up may be `Quantised`, and the scaled stream is then rounded
        to 8-bit floats, too.
      layer: int32 `[1]`.
      counts: from `token_product.gate`; its last column was zero.
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
        before, scale = refs
        after = (token_columns.load(before, first, tokens) + y).astype(x.dtype)
        token_columns.store(outs[0], first, after)
        after = after.astype(jnp.float32)
        factor = token_columns.load(scale.at[layer], first, tokens)
        token_columns.store(outs[1], first, after * factor)
        token_columns.store_sums(outs[2], first // token_columns.COLUMNS, after * after)

    def row(refs, outs, layer, token, columns, y, _):
        before, scale = refs
        after = (_wide(before.at[token, columns]) + y).astype(x.dtype)
        outs[0][token, columns] = after
        after = after.astype(jnp.float32)
        factor = _wide(scale.at[layer, columns])
        outs[1][token, columns] = (after * factor).astype(x.dtype)
        token_columns.store_total(outs[2].at[token], lax.axis_index("part"), jnp.sum(after * after))

    operands = gate, stream.scaled, weights, layer, stream.squares
    further, stores = (stream.x, scale), _Stores(row, columns)
    y = _call("token_add_ffn", operands, counts, further, outs, batch, eps, stores, rectifier)
    return Stream(*y)


@dataclasses.dataclass(frozen=True)
class _Plan:
    """How the kernel works.

    Attributes:
      up: the dense product with w_up; None without a gate projection.
      down: the dense product with w_down.
      dense_clusters: clusters that multiply densely.
      batch: tokens.
      further: operands of `stores`.
      eps: of the norm.
      stores: what is done with results.
      rectifier: what made the gate.
    """

    up: TokenRing | None
    down: TokenRing
    dense_clusters: int
    batch: int
    further: int
    eps: float
    stores: _Stores
    rectifier: Rectifier


def _call(name, operands, counts, further, outs, batch, eps, stores, rectifier):
    gate, x, weights, layer, squares = operands
    (_, h), d = gate.shape, x.shape[1]
    rows = max(1, _ROW_LOADS // gather.row_steps(d))
    lists = dict(
        entries=plgpu.SMEM((h // PARTS + 2 * rows,), jnp.uint32),
        counts=plgpu.SMEM((2, 4), jnp.int32),
        sums=plgpu.SMEM((2, rows, 4), jnp.float32),
    )
    sums_of_rows = dict(
        y_parts=plgpu.SMEM((PARTS, gather.row_width(d) // PARTS), jnp.float32),
        l1_parts=plgpu.SMEM((PARTS,), jnp.float32),
    )
    options = dict(on_sm=_ON_SM, reserved=token_ring.size(lists))
    linear = None if weights.linear is None else (weights.linear,)
    up = None if linear is None else TokenRing.of(x, linear, k_axis=2, **options)
    down = TokenRing.of(gate, (weights.down,), k_axis=1, **options)
    rings = [r for r in (up, down) if r is not None]
    memory = dict(
        memory=plgpu.RefUnion(*(r.memory() for r in rings), sums_of_rows),
        lists=lists,
        parts=down.parts(),
        arrived=plgpu.SMEM((4,), jnp.uint32),
    )
    clusters = min(max(r.tiles for r in rings), token_ring.most_waiting(memory, _ON_SM))
    plan = _Plan(up, down, clusters, batch, len(further), eps, stores, rectifier)
    kernel = plgpu.kernel(
        functools.partial(_kernel, plan=plan),
        out_type=(*outs, jax.ShapeDtypeStruct(gate.shape, gate.dtype)),
        scratch_types=dict(**memory, here=[r.barriers() for r in rings]),
        grid=(max(batch, clusters),),
        grid_names=("tile",),
        cluster=(PARTS,),
        cluster_names=("part",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    matrices = [None if w is None else Matrices.of(w) for w in (linear, (weights.down,))]
    operands = Operands(gate, x, *matrices, layer, squares)
    operands, further = in_place.barrier((operands, further))
    *outs, _ = in_place.barrier(kernel(operands, counts, *further))
    return outs


def _kernel(operands, counts, *refs, memory, lists, here, parts, arrived, plan):
    further, (*outs, h), memory = refs[: plan.further], refs[plan.further :], list(memory)
    number, tile = operands.layer[0], lax.axis_index("tile")
    tokens, is_row = operands.gate.shape[0], tile < plan.batch
    token = jnp.minimum(tile, plan.batch - 1)
    cluster.prepare(arrived)
    x_row = None if plan.up is None else _load_x(operands, token, is_row, lists["sums"], plan)
    plgpu.griddepcontrol_launch_dependents()
    plgpu.griddepcontrol_wait()
    open_of_tokens = open_gates.load(counts.at[number, :, pl.ds(0, tokens)])
    # While those are on their way, rows are prepared as if few gates were open.
    count = lax.cond(is_row, lambda: _list(operands, token, lists), lambda: jnp.int32(0))
    is_sparse = open_gates.are_few(open_of_tokens, MOST_OPEN, MOST_OPEN_OF_A_TOKEN)

    @pl.when(is_sparse & is_row)
    def _():
        row = _sum_rows(x_row, operands, count, lists, memory[-1], arrived, plan.rectifier)
        plan.stores.row(further, outs, number, token, *row)

    @pl.when(~is_sparse & (tile < plan.dense_clusters))
    def _():
        shared = dict(parts=parts, arrived=arrived)
        rings = zip(memory[:-1], here, strict=True)
        smem = [dict(ring=ring, here=barriers, **shared) for ring, barriers in rings]
        _multiply(operands, h, smem, counts.at[number, 0, tokens], further, outs, plan)


def _load_x(operands, token, is_row, scratch, plan):
    """The normed x of a token, a float32 row."""
    x_row = gather.load_row(operands.x.at[token], is_row)
    is_8_bits = plan.up.is_8_bits
    x_row = round_tokens.round_row(x_row, scratch.at[0, 0]) if is_8_bits else gather.widen(x_row)
    if operands.squares is None:
        return x_row
    squares, d = operands.squares.at[token], operands.x.shape[1]
    return x_row * token_columns.inverse_rms_of_one(squares, d, plan.eps)


def _list(operands, token, lists):
    """Lists this block's share of a token's open gates, and counts them."""
    part, gate = lax.axis_index("part"), operands.gate.at[token]
    count = shares.collect_share(gate, part, PARTS, lists["entries"], lists["counts"])
    return (count + PARTS - 1 - part) // PARTS


def _sum_rows(x_row, operands, count, lists, memory, arrived, rectifier):
    """This block's columns of a token's result: which ones, their values, and the token's l1."""
    number, part = operands.layer[0], lax.axis_index("part")
    y_parts, l1_parts = memory["y_parts"], memory["l1_parts"]
    cluster.expect(4 * (y_parts.size + l1_parts.size), arrived)
    w_up = up_scale = None
    if operands.up is not None:
        w_up = operands.up.values[0].at[number]
        up_scale = operands.up.scales and operands.up.scales[0].at[number]
    w_down = operands.down.values[0].at[number]
    entries, scratch = lists["entries"], lists["sums"]
    sums = gather.gather_ffn(x_row, entries, count, w_up, w_down, scratch, rectifier, up_scale)
    cluster.send_parts(*sums, part, y_parts, l1_parts, arrived)
    cluster.wait_for_parts(arrived)
    y = functools.reduce(jnp.add, [_wide(y_parts.at[p]) for p in range(PARTS)])
    l1 = functools.reduce(jnp.add, [l1_parts[p] for p in range(PARTS)])
    return pl.ds(part * y.size, y.size), y, l1


def _multiply(operands, h, smem, arrivals, further, outs, plan):
    """The whole block densely: every `dense_clusters`-th tile of neurons, then of columns."""
    number, tile, stride = operands.layer[0], lax.axis_index("tile"), plan.dense_clusters
    activation = operands.gate if plan.up is None else h
    down = Product(plan.down, activation, operands.down, number, tile, smem[-1])

    def fetch_down():
        pl.when(tile < plan.down.tiles)(down.fetch_matrices)

    def store_columns(first, y):
        plan.stores.columns(further, outs, number, first, y)

    if plan.up is None:
        fetch_down()
    else:
        up = Product(plan.up, operands.x, operands.up, number, tile, smem[0])
        pl.when(tile < plan.up.tiles)(up.fetch_matrices)
        up = up.with_scales()
        store_hidden = _hidden(operands, h, further, outs, plan)
        token_ring.multiply_tiles(up, stride, store_hidden, fetch_down)
        grid.arrive(arrivals)
        grid.wait(arrivals, PARTS * stride)
    token_ring.multiply_tiles(down, stride, store_columns, lambda: None)


def _hidden(operands, h, further, outs, plan):
    """What stores the hidden activation of 16 neurons, given their first and their up."""
    tokens, d = operands.x.shape
    scale = 1.0
    if operands.squares is not None:
        scale = token_columns.inverse_rms(operands.squares, d, plan.eps)

    def store(first, up):
        g = token_columns.load(operands.gate, first, tokens)
        opens = lax.bitcast_convert_type(g, jnp.uint32) != 0
        value = jnp.where(opens, g * plan.rectifier.linear(up * scale), 0.0)
        token_columns.store(h, first, value)
        plan.stores.hidden(further, outs, first, value)

    return store


def _wide(ref) -> jax.Array:
    """`ref: [n]` in float32, two neighbours in each register."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=2)
    return plgpu.load(ref, layout=layout).astype(jnp.float32)

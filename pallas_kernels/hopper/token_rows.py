"""Up and down projection of a few tokens, neuron by neuron, reading only the rows they need.

The blocks of a cluster share out a token's non-zeros evenly, walk them (`gather.gather_ffn`) and
send each other their sums, which are added in a fixed order. No row overflows: each non-zero costs
4 D bytes of weights, mostly from L2.
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels.hopper.device import cluster, gather, shares, token_columns
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.layouts.weights import Weights

ROW_LOADS = 8
"""16-byte loads from each weight matrix that a lane keeps in flight, or one row's worth where that
is more; from 17 tokens on 3/4 as many, for three blocks on an SM rather than two."""


def multiply(
    gate: jax.Array, x: jax.Array, weights: Weights, *, row_loads: int = ROW_LOADS
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """`(gate * (x @ w_up^T)) @ w_down`, or `gate @ w_down` without a gate projection.

    Args:
      gate: `[>= M, H]`, not negative; rows past M are not read. The kernel that computes it must
        have waited for x.
      x: `[M, D]`, M up to 64.
      weights: `[H, D]` each.
      row_loads: see `ROW_LOADS`.

    Returns:
      y: `[M, row_width(D)]`, columns past D are padding.
      nnz: int32 `[M]`, the number of non-zeros of the gate.
      l1: float32 `[M]`, the sum of the magnitudes of the hidden activation.
    """
    m, d = x.shape

    def rows(refs, token):
        x, w_up, w_down = refs
        x_row = None if x is None else gather.widen(gather.load_row(x.at[token], jnp.bool(True)))
        return x_row, w_up, w_down

    def finish(refs, outs, token, columns, y_columns, totals):
        del refs
        y, nnz, l1 = outs
        y[token, columns] = y_columns.astype(y.dtype)

        @pl.when(lax.axis_index("block") == 0)
        def _():
            nnz[token], l1[token] = totals

    outs = (
        jax.ShapeDtypeStruct((m, gather.row_width(d)), x.dtype),
        jax.ShapeDtypeStruct((m,), jnp.int32),
        jax.ShapeDtypeStruct((m,), jnp.float32),
    )
    operands = None if weights.linear is None else x, weights.linear, weights.down
    y, nnz, l1 = _call("few_tokens_row", rows, finish, gate, operands, outs, m, d, row_loads)
    return y, nnz, l1


def add(
    gate: jax.Array,
    stream: Stream,
    weights: Weights,
    layer: jax.Array,
    scale: jax.Array,
    *,
    tokens: int,
    eps: float,
) -> Stream:
    """Adds the block's output to the residual stream: `x + (gate * (norm(x) @ w_up^T)) @ w_down`.

    Args:
      gate: `[M, H]`, not negative. The kernel that computes it must have waited for the stream.
      stream: of M tokens, D a multiple of 1024.
      weights: `[layers, H, D]` each.
      layer: int32 `[1]`.
      scale: `[layers, D]`, of the norm that comes next.
      tokens: the first so many are computed; what the others hold afterwards is undefined.
      eps: of the norm.

    Returns:
      The stream in front of the next norm.
    """
    m, d = stream.x.shape

    def rows(refs, token):
        _, scaled, squares, layer, _, w_up, w_down = refs
        number = layer[0]
        if w_up is None:
            return None, None, w_down.at[number]
        x_row = gather.widen(gather.load_row(scaled.at[token], jnp.bool(True)))
        x_row *= token_columns.inverse_rms_of_one(squares.at[token], d, eps)
        return x_row, w_up.at[number], w_down.at[number]

    def finish(refs, outs, token, columns, y_columns, totals):
        del totals
        x, _, _, layer, scale, _, _ = refs
        after = (x[token, columns].astype(jnp.float32) + y_columns).astype(x.dtype)
        outs[0][token, columns] = after
        after = after.astype(jnp.float32)
        factor = scale[layer[0], columns].astype(jnp.float32)
        outs[1][token, columns] = (after * factor).astype(x.dtype)
        outs[2][token, lax.axis_index("block")] = jnp.sum(after * after)

    outs = (
        jax.ShapeDtypeStruct((m, d), stream.x.dtype),
        jax.ShapeDtypeStruct((m, d), stream.x.dtype),
        jax.ShapeDtypeStruct((m, shares.SHARES), jnp.float32),
    )
    operands = *stream, layer, scale, weights.linear, weights.down
    name = "token_add_rows"
    return Stream(*_call(name, rows, finish, gate, operands, outs, tokens, d, ROW_LOADS))


def _call(
    name: str, rows: Callable, finish: Callable, gate, operands, outs, tokens, d, row_loads
) -> tuple[jax.Array, ...]:
    """Runs a cluster for each token.

    Args:
      name: of the kernel.
      rows: `rows(operands, token)` -> x, a float32 row or None, and references to w_up and w_down.
      finish: `finish(operands, results, token, columns, y, (nnz, l1))` stores a block's columns of
        the token's sum, float32.
      gate, operands: inputs.
      outs: shapes and dtypes of the results.
      tokens: number of clusters.
      d: columns of a row.
      row_loads: see `ROW_LOADS`.
    """
    h, width = gate.shape[1], gather.row_width(d)
    loads = row_loads if tokens <= 16 else 3 * row_loads // 4
    batch = max(1, loads // gather.row_steps(d))
    kernel = plgpu.kernel(
        functools.partial(_kernel, operands=len(operands), rows=rows, finish=finish),
        out_type=outs,
        scratch_types=dict(
            entries=plgpu.SMEM((h // shares.SHARES + 2 * batch,), jnp.uint32),
            counts=plgpu.SMEM((2, 4), jnp.int32),
            sums=plgpu.SMEM((2, batch, 4), jnp.float32),
            y_parts=plgpu.SMEM((shares.SHARES, width // shares.SHARES), jnp.float32),
            l1_parts=plgpu.SMEM((shares.SHARES,), jnp.float32),
            arrived=plgpu.SMEM((2,), jnp.uint32),
        ),
        grid=(tokens,),
        grid_names=("token",),
        cluster=(shares.SHARES,),
        cluster_names=("block",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return kernel(gate, *operands)


def _kernel(gate, *refs, operands, rows, finish, entries, counts, sums, y_parts, l1_parts, arrived):
    refs, outs = refs[:operands], refs[operands:]
    token, block = lax.axis_index("token"), lax.axis_index("block")
    cluster.expect_parts(y_parts, l1_parts, arrived)
    # x is complete: the gate's kernel waited for it before launching this one
    x_row, w_up, w_down = rows(refs, token)
    is_finite = True if x_row is None else gather.all_finite(x_row, sums.at[1])
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    token_nnz = shares.collect_share(gate.at[token], block, entries, counts)
    count = (token_nnz + shares.SHARES - 1 - block) // shares.SHARES
    y_part, l1_part = gather.gather_ffn(x_row, entries, count, w_up, w_down, sums)
    cluster.send_parts(y_part, l1_part, block, y_parts, l1_parts, arrived)
    cluster.wait_for_parts(arrived)

    def total(parts):
        sum_of_parts = functools.reduce(jnp.add, [parts[b] for b in range(shares.SHARES)])
        # In the dense computation 0 * inf, behind a gate of zero, makes NaN.
        return jnp.where(is_finite | (token_nnz == gate.shape[1]), sum_of_parts, jnp.nan)

    width = y_parts.shape[1]
    columns = pl.ds(block * width, width)
    finish(refs, outs, token, columns, total(y_parts), (token_nnz, total(l1_parts)))

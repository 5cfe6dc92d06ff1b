"""The down projection of a sparse block for up to 64 tokens, for any pattern.

If few gates are open, a cluster of four blocks serves a token: the blocks share out its non-zeros,
walk the rows of w_down (`gather.gather_ffn`) and send each other their sums. If many are, a cluster
multiplies 64 columns of all tokens densely (`frames.token_ring`). The numbers of open gates, which
`token_hidden` has counted on the device, decide; sums have a fixed order either way.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.device import cluster, gather, pairs, shares, token_columns
from pallas_kernels.hopper.frames import token_ring
from pallas_kernels.hopper.frames.token_ring import PARTS, Product, TokenRing
from pallas_kernels.layouts.stream import Stream

# Rows are read one by one up to so many open gates. A block then takes 16 rounds of 8 rows, about
# as long as its part of a dense product takes (D = 2048, H = 5632, H100).
MOST_OPEN_OF_A_TOKEN = 512
MOST_OPEN = 8192  # of all tokens together
_ROW_LOADS = 16  # 16-byte loads of rows that a lane keeps in flight, or one row's


def add_down(
    h: jax.Array, w_down: jax.Array, layer: jax.Array, open_gates: jax.Array, x: jax.Array,
    scale: jax.Array, *, batch: int,
) -> Stream:  # fmt: skip
    """Adds the block's output to the residual stream: `x + h @ w_down[layer]`.

    Args:
      h: `[M, H]`, M a multiple of 8 up to 64.
      w_down: `[layers, H, D]`, D a multiple of 1024.
      layer: int32 `[1]`.
      open_gates: int32 `[layers, M]`, their number for each token; at `layer`.
      x: `[M, D]`.
      scale: `[layers, D]`, of the norm that comes next.
      batch: the first so many tokens are computed; what the others hold afterwards is undefined.

    Returns:
      The stream in front of that norm.
    """
    tokens, d = x.shape
    sums = d // token_columns.COLUMNS
    outs = (
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((tokens, sums), jnp.float32),
    )

    def store_columns(refs, outs, number, first, y):
        before, scale = refs
        after = (token_columns.load(before, first, tokens) + y).astype(x.dtype)
        token_columns.store(outs[0], first, after)
        after = after.astype(jnp.float32)
        factor = token_columns.load(scale.at[number], first, tokens)
        token_columns.store(outs[1], first, after * factor)
        token_columns.store_squares(outs[2], first // token_columns.COLUMNS, after)

    def store_row(refs, outs, number, token, columns, y):
        before, scale = refs
        after = (_wide(before.at[token, columns]) + y).astype(x.dtype)
        outs[0][token, columns] = after
        after = after.astype(jnp.float32)
        factor = _wide(scale.at[number, columns])
        outs[1][token, columns] = (after * factor).astype(x.dtype)
        token_columns.store_total(outs[2].at[token], lax.axis_index("part"), jnp.sum(after * after))

    stores = store_columns, store_row
    return Stream(
        *_call("token_add_down", h, w_down, layer, open_gates, (x, scale), outs, batch, stores)
    )


def down(
    h: jax.Array, w_down: jax.Array, layer: jax.Array, open_gates: jax.Array, *, batch: int
) -> jax.Array:
    """`h @ w_down[layer]` as in `add_down`, without a stream: `[M, row_width(D)]`, with padding."""
    out = jax.ShapeDtypeStruct((h.shape[0], gather.row_width(w_down.shape[2])), h.dtype)

    def store_columns(refs, outs, number, first, y):
        del refs, number
        token_columns.store(outs[0], first, y)

    def store_row(refs, outs, number, token, columns, y):
        del refs, number
        outs[0][token, columns] = y.astype(h.dtype)

    stores = store_columns, store_row
    (y,) = _call("token_down", h, w_down, layer, open_gates, (), (out,), batch, stores)
    return y


def _call(name, h, w_down, layer, open_gates, operands, outs, batch, stores):
    """Runs the kernel.

    `stores` are called with the operands, the results, the layer, and what they store: the first
    and the values of 16 columns of all tokens; or a token, columns, and their values.
    """
    ring = TokenRing.of(h, (w_down,), k_axis=1)
    neurons, d = h.shape[1], w_down.shape[2]
    width, rows = gather.row_width(d), max(1, _ROW_LOADS // gather.row_steps(d))
    kernel = plgpu.kernel(
        functools.partial(_kernel, operands=len(operands), ring=ring, batch=batch, stores=stores),
        out_type=outs,
        scratch_types=dict(
            smem=ring.scratch(h.dtype),
            entries=plgpu.SMEM((neurons // PARTS + 2 * rows,), jnp.uint32),
            counts=plgpu.SMEM((2, 4), jnp.int32),
            sums=plgpu.SMEM((2, rows, 4), jnp.float32),
            y_parts=plgpu.SMEM((PARTS, width // PARTS), jnp.float32),
            l1_parts=plgpu.SMEM((PARTS,), jnp.float32),
        ),
        grid=(max(ring.tiles, batch),),
        grid_names=("tile",),
        cluster=(PARTS,),
        cluster_names=("part",),
        kernel_name=name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    return in_place.barrier(kernel(*in_place.barrier((h, layer, w_down, open_gates)), *operands))


def _kernel(
    h, layer, w_down, open_gates, *refs, smem, entries, counts, sums, y_parts, l1_parts, operands,
    ring, batch, stores,
):  # fmt: skip
    refs, outs = refs[:operands], refs[operands:]
    number, tile, part = layer[0], lax.axis_index("tile"), lax.axis_index("part")
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    is_sparse = pairs.are_few(open_gates.at[number], MOST_OPEN, MOST_OPEN_OF_A_TOKEN)

    @pl.when(is_sparse & (tile < batch))
    def _():
        cluster.expect_parts(y_parts, l1_parts, smem["arrived"])
        count = shares.collect_share(h.at[tile], part, PARTS, entries, counts)
        count = (count + PARTS - 1 - part) // PARTS
        y, l1 = gather.gather_ffn(None, entries, count, None, w_down.at[number], sums)
        cluster.send_parts(y, l1, part, y_parts, l1_parts, smem["arrived"])
        cluster.wait_for_parts(smem["arrived"])
        y = functools.reduce(jnp.add, [_wide(y_parts.at[p]) for p in range(PARTS)])
        width = y_parts.shape[1]
        stores[1](refs, outs, number, tile, pl.ds(part * width, width), y)

    @pl.when(~is_sparse & (tile < ring.tiles))
    def _():
        product = Product(ring, h, (w_down,), number, smem)
        product.fetch_matrices()
        product.fetch_tokens()
        (y,) = product.sums()
        stores[0](refs, outs, number, token_ring.first_column(), y)


def _wide(ref) -> jax.Array:
    """`ref: [n]` in float32, two neighbours in each register."""
    layout = plgpu.Layout.WG_STRIDED(ref.shape, vec_size=2)
    return plgpu.load(ref, layout=layout).astype(jnp.float32)

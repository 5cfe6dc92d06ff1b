"""The hidden activation of a sparse block for up to 64 tokens: gate, and up where it is open.

The gate is a product of few tokens (`frames.token_ring`); each block finishes 16 neurons. Then it
computes the up projection of its open gates at once, one warp for a pair of a neuron and a token.
Where there are many pairs, it multiplies the 16 neurons with all tokens by WGMMA instead. So no
pattern takes more than about the time of a dense block, and each block decides for itself.

The open gates of each token are counted for `token_down`, which chooses by them.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.device import pairs, token_columns, warpgroup
from pallas_kernels.hopper.device.token_columns import COLUMNS
from pallas_kernels.hopper.frames import token_ring
from pallas_kernels.hopper.frames.token_ring import PARTS, Product, TokenRing

_MOST_PAIRS = 16  # of a block, one by one: four rounds of its warps


def hidden(
    x: jax.Array,
    weights: tuple[jax.Array, ...],
    layer: jax.Array,
    open_gates: jax.Ref,
    *,
    batch: int,
    norm: tuple[jax.Array, float] | None = None,
    prefetch: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """`relu(x @ w_gate^T) * (x @ w_up^T)`, or `relu(x @ w_up^T)` without a gate.

    The gate is rounded to the dtype of x, all else is float32 until h is rounded. Where x is not
    finite, h is as in the dense computation, in which a gate of zero meets inf or NaN.

    Args:
      x: `[M, D]`, M a multiple of 8 up to 64.
      weights: (gate, up) or (up,), each `[layers, H, D]` in the dtype of x, H a multiple of 64.
      layer: int32 `[1]`.
      open_gates: mutable int32 `[layers, M]`; gets their number added for each token, at `layer`.
      batch: the first so many tokens are computed, the others are padding.
      norm: `Stream.squares` and epsilon, if x is the scaled stream of a norm.
      prefetch: w_down, `[layers, H, D]`; rows of open gates are prefetched into L2.

    Returns:
      The gate and h, `[M, H]` in the dtype of x. What they hold for padding is undefined.
    """
    ring = TokenRing.of(x, weights[:1], k_axis=2)
    squares, eps = norm if norm is not None else (None, 0.0)
    out = jax.ShapeDtypeStruct((x.shape[0], weights[0].shape[1]), x.dtype)
    size = COLUMNS * x.shape[0]
    kernel = plgpu.kernel(
        functools.partial(_kernel, ring=ring, batch=batch, eps=eps),
        out_type=(out, out),
        scratch_types=dict(
            smem=ring.scratch(x.dtype),
            pairs_smem=plgpu.SMEM((size,), jnp.uint32),
            count_smem=plgpu.SMEM((1,), jnp.int32),
            up_smem=plgpu.SMEM((size,), jnp.float32),
        ),
        grid=(ring.tiles,),
        grid_names=("tile",),
        cluster=(PARTS,),
        cluster_names=("part",),
        kernel_name="token_hidden",
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
        ),
    )
    up = weights[1] if len(weights) == 2 else None
    operands = in_place.barrier((x, layer, weights[0], up, squares, prefetch))
    return in_place.barrier(kernel(*operands, open_gates))


def _kernel(
    x, layer, w_gate, w_up, squares, w_down, open_gates, gate, h, *, smem, pairs_smem, count_smem,
    up_smem, ring, batch, eps,
):  # fmt: skip
    number, first = layer[0], token_ring.first_column()
    product = Product(ring, x, (w_gate,), number, smem)
    product.fetch_matrices()
    plgpu.griddepcontrol_wait()
    plgpu.griddepcontrol_launch_dependents()
    product.fetch_tokens()
    scale = 1.0
    if squares is not None:
        scale = token_columns.inverse_rms(squares, x.shape[1], eps)
    (before,) = product.sums()
    before *= scale
    g = jnp.maximum(before, 0.0).astype(gate.dtype)
    token_columns.store(gate, first, g)
    g = g.astype(jnp.float32)
    count = pairs.list_pairs(g, batch, pairs_smem, count_smem, open_gates.at[number])
    is_sparse = (count > 0) & (count <= _MOST_PAIRS)

    @pl.when(is_sparse)
    def _():
        token_columns.prefetch_rows(w_down.at[number], first, g, batch)

    if w_up is None:
        token_columns.store(h, first, g)
        return

    @pl.when(is_sparse)
    def _():
        pairs.multiply_pairs(pairs_smem, count, x, w_up.at[number], first, up_smem)

    @pl.when(count > _MOST_PAIRS)
    def _():
        _multiply_all(x, w_up, number, first, smem, up_smem, ring)

    up = plgpu.load(up_smem, layout=token_columns.layout(ring.tokens)) * scale
    value = jnp.where(g != 0, g * up, 0.0)
    # x is not finite, so up is not either: 0 * inf and 0 * NaN are NaN.
    token_columns.store(h, first, jnp.where(before == -jnp.inf, jnp.nan, value))


def _multiply_all(x, w_up, number, first, smem, up_smem, ring):
    """The up projection of the 16 neurons for all tokens, to SMEM `[16 * tokens]`."""
    steps = pl.cdiv(ring.k, ring.stage_k)

    def fetch(step):
        slot = lax.rem(step, ring.slots)
        columns, here = pl.ds(step * ring.stage_k, ring.stage_k), smem["here"].at[slot]
        # Of the 64 rows of the operand these are the first; what the others hold does not matter.
        rows = smem["w_smem"].at[slot, 0, pl.ds(0, COLUMNS)]
        plgpu.copy_gmem_to_smem(w_up.at[number, pl.ds(first, COLUMNS), columns], rows, here)
        plgpu.copy_gmem_to_smem(x.at[:, columns], smem["x_smem"].at[slot], here)

    for step in range(min(ring.slots, steps)):
        fetch(jnp.int32(step))

    def accumulate(acc):
        @pl.loop(0, steps)
        def _(step):
            slot = lax.rem(step, ring.slots)
            plgpu.barrier_wait(smem["here"].at[slot])
            plgpu.wgmma(acc, smem["w_smem"].at[slot, 0], smem["x_smem"].at[slot].T)
            plgpu.wgmma_wait(0)
            warpgroup.barrier()
            pl.when(step + ring.slots < steps)(lambda: fetch(step + ring.slots))

        return acc[...]

    acc = plgpu.ACC((token_ring.COLUMNS, ring.tokens), jnp.float32)
    pairs.keep_rows(pl.run_scoped(accumulate, acc), up_smem)

"""The forward of a block by the kernels of a back end, but for unions, which have their own file.

Few tokens (decoding) need two kernels and no packed format, short prompts two dense kernels. For
more tokens, TwELL: a kernel gathers the weights of the neurons that are active for each token.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import in_place, pattern_shares, quantised
from pallas_kernels.kernels import BlockKernels
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts import twell as layout
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn.stats import NOT_MEASURED, Output


def few_tokens(kernels: BlockKernels, act: Rectifier, x: jax.Array, weights: Weights) -> Output:
    """The block for `x: [M, D]`, M up to 64."""
    y, nnz, l1, fired = kernels.few_tokens_ffn(x, weights, act)
    return Output(y, nnz, jnp.sum(l1), fired, tiles=fired.astype(jnp.int32))


def dense_block(kernels: BlockKernels, act: Rectifier, x: jax.Array, weights: Weights) -> Output:
    """The block for `x: [M, D]`, computed densely; its statistics are made of h."""
    y, h = kernels.dense_block(x, weights, act)
    # XLA leaves out the statistics that nobody asks for.
    active = jax.lax.bitcast_convert_type(h, jnp.uint16) != 0
    union, listed = pattern_shares.of_dense(active)
    return Output(
        y,
        nnz=jnp.sum(active, axis=1, dtype=jnp.int32),
        l1=jnp.sum(jnp.abs(h), dtype=jnp.float32),
        fired=jnp.any(active, axis=0),
        tiles=tile_union.tiles_of_dense(active),
        union=union,
        listed=listed,
    )


def twell(kernels: BlockKernels, act: Rectifier, x: jax.Array, weights: Weights) -> Output:
    """The block for `x: [M, D]`, from the gate in TwELL."""
    activated = weights.activated
    tokens = quantised.tokens(x, weights.inner, kernels.round_tokens)
    x_gate = quantised.for_product(tokens, activated)
    packed = kernels.gate_pack(x_gate, activated, act, dtype=x.dtype)
    y, nnz, l1, heavy = kernels.fused_ffn(tokens, packed, weights.linear, weights.down, act)
    y_rows, heavy_l1, heavy_fired, _ = kernels.dense_rows(heavy, weights, act)
    y_ref = in_place.mutable(y)
    kernels.place_rows(heavy.count, heavy.rows, y_rows, y_ref)
    nnz, l1 = (in_place.used_after(heavy_l1, a) for a in (nnz, l1))
    fired = layout.fired(packed, len(weights.down)) | heavy_fired
    tiles = jnp.full(fired.shape, NOT_MEASURED, jnp.int32)
    return Output(in_place.contents(y_ref), nnz, jnp.sum(l1) + heavy_l1, fired, tiles)

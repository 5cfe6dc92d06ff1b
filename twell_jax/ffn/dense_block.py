"""The block for 65 to 1023 tokens: two dense kernels, of whose h the statistics are made."""

import jax
import jax.numpy as jnp

from pallas_kernels import pattern_shares
from pallas_kernels.kernels import Kernels
from pallas_kernels.layouts import tile_union
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn.stats import Output


def forward(kernels: Kernels, act: Rectifier, x: jax.Array, weights: Weights) -> Output:
    """The block for `x: [M, D]`."""
    y, h = kernels.dense_block(x, weights, act)
    # XLA leaves out the statistics that nobody asks for.
    fires = jax.lax.bitcast_convert_type(h, jnp.uint16) != 0
    union, listed = pattern_shares.of_dense(fires)
    return Output(
        y,
        nnz=jnp.sum(fires, axis=1, dtype=jnp.int32),
        l1=jnp.sum(jnp.abs(h), dtype=jnp.float32),
        fired=jnp.any(fires, axis=0),
        tiles=tile_union.tiles_of_dense(fires),
        union=union,
        listed=listed,
    )

"""The block by TwELL: a kernel gathers the weights of the neurons that each token uses."""

import jax
import jax.numpy as jnp

from pallas_kernels import in_place, quantised
from pallas_kernels.kernels import Kernels
from pallas_kernels.layouts import twell
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn.stats import NOT_MEASURED, Output


def forward(kernels: Kernels, act: Rectifier, x: jax.Array, weights: Weights) -> Output:
    """The block for `x: [M, D]`."""
    activated = weights.activated
    tokens = quantised.tokens(x, weights.inner, kernels.round_tokens)
    x_gate = quantised.for_product(tokens, activated)
    packed = kernels.gate_pack(x_gate, activated, act, dtype=x.dtype)
    y, nnz, l1, heavy = kernels.fused_ffn(tokens, packed, weights.linear, weights.down, act)
    y_rows, heavy_l1, heavy_fired, _ = kernels.dense_rows(heavy, weights, act)
    y_ref = in_place.mutable(y)
    kernels.place_rows(heavy.count, heavy.rows, y_rows, y_ref)
    # XLA would put the sums of these between the two kernels, which then could not overlap.
    nnz, l1 = (jnp.where(heavy_l1 < 0, 0, a) for a in (nnz, l1))  # it never is
    fired = twell.fired(packed, len(weights.down)) | heavy_fired
    tiles = jnp.full(fired.shape, NOT_MEASURED, jnp.int32)
    return Output(in_place.contents(y_ref), nnz, jnp.sum(l1) + heavy_l1, fired, tiles)

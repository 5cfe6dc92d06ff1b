"""The block for up to 64 tokens (decoding): two kernels and no packed format."""

import jax
import jax.numpy as jnp

from pallas_kernels.kernels import Kernels
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn.stats import Output


def forward(kernels: Kernels, act: Rectifier, x: jax.Array, weights: Weights) -> Output:
    """The block for `x: [M, D]`, M up to 64."""
    y, nnz, l1, fired = kernels.few_tokens_ffn(x, weights, act)
    return Output(y, nnz, jnp.sum(l1), fired, tiles=fired.astype(jnp.int32))

"""What decoding reads of a model, as one value: its layers, stacked."""

from typing import NamedTuple

import jax

from pallas_kernels.quantised import Operand
from pallas_kernels.weights import Weights


class Layers(NamedTuple):
    """The weights of L transformer layers, stacked.

    Attributes:
      qkv: the kernels of the query, key and value projections, each `[L, D, N]`; or all are
        `Quantised`, `[L, N, D]`.
      qkv_bias: `[L, sum of N]`, or None.
      out: `[L, heads * head_dim, D]`; `Quantised`, `[L, D, heads * head_dim]`.
      out_bias: `[L, D]`, or None.
      mlp: of the feed-forward blocks, each `[L, H, D]`, and their live neurons.
      scales: of the norms, `[L, D]` each: before the feed-forward block of a layer, and after it,
        which is the next layer's first or the last of the model.
      head_scales: of the norms of each query's and each key's head, `[L, head_dim]` each, or None.
      norm_biases: like `scales`, where the norms are layer norms; None where they are RMS norms.
      inner_biases: of `mlp.inner`, `[L, H]` each, or None.
      down_bias: `[L, D]`, or None.
    """

    qkv: tuple[Operand, ...]
    qkv_bias: jax.Array | None
    out: Operand
    out_bias: jax.Array | None
    mlp: Weights
    scales: tuple[jax.Array, jax.Array]
    head_scales: tuple[jax.Array, jax.Array] | None = None
    norm_biases: tuple[jax.Array, jax.Array] | None = None
    inner_biases: tuple[jax.Array, ...] | None = None
    down_bias: jax.Array | None = None

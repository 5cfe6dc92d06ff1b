"""Products of up to 64 tokens with matrices that are read once, at the speed of memory (decoding).

The thread blocks of a cluster multiply (`token_call`); then each finishes 16 columns: norm, bias,
activation or residual.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.hopper.decode import token_columns
from pallas_kernels.hopper.decode.launch import Phase, launched, only
from pallas_kernels.hopper.decode.token_call import TokenCall, only_live
from pallas_kernels.hopper.decode.token_ring import TokenRing
from pallas_kernels.layouts.stream import Stream
from pallas_kernels.quantised import Operand, Quantised
from pallas_kernels.rectifiers import Rectifier


def project_phase(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    k_axis: int,
    eps: float,
    bias: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> Phase[jax.Array]:
    """Products of the normed stream with matrices, side by side: `norm(x) @ concat(weights)`.

    Args:
      stream: of at most 64 tokens, a multiple of 8.
      weights: each `[layers, D, N_i]` (`k_axis` 1) or `[layers, N_i, D]` (2), in the dtype of the
        stream; D a multiple of 256, N_i of 64. Or all are `Quantised` (2); then the scaled stream
        is rounded to 8-bit floats, too.
      layer: int32 `[1]`, the matrices' index.
      k_axis: the axis of D.
      eps: of the norm.
      bias: `[layers, sum of N_i]`, or None.
      dtype: of the result; None takes the stream's.

    Returns:
      `[M, sum of N_i]`.
    """
    tokens = stream.x.shape[0]
    columns = sum(w.shape[3 - k_axis] for w in weights)
    out = jax.ShapeDtypeStruct((tokens, columns), dtype or stream.x.dtype)

    def finish(refs, outs, number, product):
        (first,), (squares, *bias_refs) = product.first_columns, refs
        scale = token_columns.inverse_rms(squares, stream.x.shape[1], eps)

        def store(values):
            (total,) = values
            total *= scale
            for bias_ref in bias_refs:
                total += token_columns.load(bias_ref.at[number], first, tokens)
            token_columns.store(outs[0], first, total)

        return store

    operands = [stream.squares] + ([] if bias is None else [bias])
    ring = TokenRing.of(stream.scaled, weights, k_axis=k_axis)
    call = TokenCall("token_project", ring, finish)
    return call.phase(stream.scaled, weights, layer, operands, [out], only)


project = launched(project_phase)


def hidden_phase(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    eps: float,
    rectifier: Rectifier | None,
    live: jax.Array | None = None,
) -> Phase[jax.Array]:
    """The hidden activation of a dense layer, `act(norm(x) @ w_0^T)`, times `norm(x) @ w_1^T`.

    Args:
      stream: of at most 64 tokens, a multiple of 8.
      weights: (gate, up) or (up,), each `[layers, H, D]` in the dtype of the stream, H a multiple
        of 64. Or both are `Quantised`, as in `project`.
      layer: int32 `[1]`.
      eps: of the norm.
      rectifier: act, which may pass the second product through a ReLU; None for SiLU.
      live: int32 `[layers]`; a layer's neurons from this number on have a hidden activation of
        zero, and whole tiles of 64 of them are not computed. None: all are.

    Returns:
      `[M, H]`.
    """
    tokens, d = stream.x.shape
    out = jax.ShapeDtypeStruct((tokens, weights[0].shape[1]), stream.x.dtype)

    def finish(refs, outs, number, product):
        squares, live_ref = refs
        first = product.first_columns[0]  # of each matrix
        scale = token_columns.inverse_rms(squares, d, eps)
        set_live = only_live(live_ref, number, first, tokens)

        def store(values):
            g, *up = (v * scale for v in values)
            h = g / (1 + jnp.exp(-g)) if rectifier is None else rectifier.gate(g, stream.x.dtype)
            for u in up:
                h *= u if rectifier is None else rectifier.linear(u)
            token_columns.store(outs[0], first, set_live(h))

        return store

    ring = TokenRing.of(stream.scaled, weights, k_axis=2, side_by_side=False)
    call = TokenCall("token_hidden_dense", ring, finish, live=1)
    return call.phase(stream.scaled, weights, layer, [stream.squares, live], [out], only)


hidden = launched(hidden_phase)


def add_product_phase(
    h: jax.Array,
    weight: Operand,
    layer: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    *,
    bias: jax.Array | None = None,
) -> Phase[Stream]:
    """Adds a product to the residual stream: `x + h @ weight[layer] + bias[layer]`.

    Args:
      h: `[M, K]`, M at most 64 and a multiple of 8, K a multiple of 64.
      weight: `[layers, K, D]`, D a multiple of 64. Or `Quantised` `[layers, D, K]`, K a multiple of
        128; then h is rounded to 8-bit floats, too.
      layer: int32 `[1]`.
      x: `[M, D]`.
      scale: `[layers, D]`, of the norm that comes next.
      bias: `[layers, D]`, or None.

    Returns:
      The stream in front of that norm.
    """
    tokens, d = x.shape
    outs = [
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct(x.shape, x.dtype),
        jax.ShapeDtypeStruct((tokens, d // token_columns.COLUMNS), jnp.float32),
    ]

    def finish(refs, outs, number, product):
        (first,), (x_ref, scale_ref, *bias_refs) = product.first_columns, refs
        written = Stream(*outs)
        before = token_columns.load(x_ref, first, tokens)
        for bias_ref in bias_refs:
            before += token_columns.load(bias_ref.at[number], first, tokens)
        factor = token_columns.load(scale_ref.at[number], first, tokens)

        def store(values):
            after = (before + values[0]).astype(x.dtype)
            token_columns.store(written.x, first, after)
            after = after.astype(jnp.float32)
            token_columns.store(written.scaled, first, after * factor)
            part = first // token_columns.COLUMNS
            token_columns.store_sums(written.squares, part, after * after)

        return store

    k_axis = 2 if isinstance(weight, Quantised) else 1
    call = TokenCall("token_add_product", TokenRing.of(h, (weight,), k_axis=k_axis), finish)
    operands = [x, scale] + ([] if bias is None else [bias])
    return call.phase(h, (weight,), layer, operands, outs, Stream)


add_product = launched(add_product_phase)

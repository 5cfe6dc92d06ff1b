"""Products of up to 64 tokens with matrices that are read once, at the speed of memory (decoding).

The blocks of a cluster multiply (`frames.token_ring`); then each finishes 16 columns: norm, bias,
activation or residual.

A block lets the next kernel start at once and asks for its part of the matrix before it waits for
the kernel before it (programmatic dependent launch), so that memory does not stand still between
kernels. Matrices must therefore be finished earlier: inputs of the program, not results of the
computations just before.
"""

import dataclasses
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.device import cluster, open_gates, token_columns, versions
from pallas_kernels.hopper.frames.token_ring import COLUMNS, PARTS, Matrices, Product, TokenRing
from pallas_kernels.layouts.quantised import Operand, Quantised
from pallas_kernels.layouts.rectifiers import RELU, Rectifier
from pallas_kernels.layouts.stream import Stream


def project(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    k_axis: int,
    eps: float,
    bias: jax.Array | None = None,
    dtype: jax.typing.DTypeLike | None = None,
) -> jax.Array:
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

    def finish(refs, outs, number, first):
        scale = token_columns.inverse_rms(refs[0], stream.x.shape[1], eps)

        def store(values):
            (total,) = values
            total *= scale
            if bias is not None:
                total += token_columns.load(refs[1].at[number], first, tokens)
            token_columns.store(outs[0], first, total)

        return store

    operands = [stream.squares] + ([] if bias is None else [bias])
    ring = TokenRing.of(stream.scaled, weights, k_axis=k_axis)
    call = _Call("token_project", ring, finish)
    return call(stream.scaled, weights, layer, operands, [out])[0]


def hidden(
    stream: Stream,
    weights: tuple[Operand, ...],
    layer: jax.Array,
    *,
    eps: float,
    rectifier: Rectifier | None,
    live: jax.Array | None = None,
) -> jax.Array:
    """The hidden activation of a dense block, `act(norm(x) @ w_0^T)`, times `norm(x) @ w_1^T`.

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

    def finish(refs, outs, number, first):
        scale = token_columns.inverse_rms(refs[0], d, eps)
        only_live = _only_live(refs[1], number, first, tokens)

        def store(values):
            g, *up = (v * scale for v in values)
            h = g / (1 + jnp.exp(-g)) if rectifier is None else rectifier.gate(g, stream.x.dtype)
            for u in up:
                h *= u if rectifier is None else rectifier.linear(u)
            token_columns.store(outs[0], first, only_live(h))

        return store

    ring = TokenRing.of(stream.scaled, weights, k_axis=2, side_by_side=False)
    call = _Call("token_hidden_dense", ring, finish, live=1)
    return call(stream.scaled, weights, layer, [stream.squares, live], [out])[0]


def gate(
    x: jax.Array,
    weight: Operand,
    layer: jax.Array,
    counts: jax.Ref,
    rectifier: Rectifier = RELU,
    *,
    batch: int,
    norm: tuple[jax.Array, float] | None = None,
    prefetch: tuple[Operand, ...] = (),
    live: jax.Array | None = None,
) -> jax.Array:
    """The gate of a sparse block, `act(x @ w^T)`; counts the open gates of each token.

    Zeros are ignored by what reads the gate, but in a dense block 0 * inf is NaN. So where x is not
    finite and the product is -inf, the gate is -0.0, which is not ignored.

    Args:
      x: `[M, D]`, M a multiple of 8 up to 64.
      weight: `[layers, H, D]` in the dtype of x, or `Quantised`, as in `project`; H a multiple of
        64.
      layer: int32 `[1]`.
      counts: mutable, as in `layouts.open_counts`; at `layer`, the number of open gates of each
        token is added.
      rectifier: act.
      batch: the first so many tokens are counted, the others are padding.
      norm: `Stream.squares` and epsilon, if x is the scaled stream of a norm.
      prefetch: `[layers, H, D]` each; rows of open gates are prefetched into L2.
      live: int32 `[layers]`; a layer's gates from this number on are zero, and whole tiles of 64 of
        them are not computed. None: all are.

    Returns:
      `[M, H]`. What it holds for padding is undefined.
    """
    tokens, d = x.shape
    squares, eps = norm if norm is not None else (None, 0.0)
    out = jax.ShapeDtypeStruct((tokens, weight.shape[1]), x.dtype)

    def finish(refs, outs, number, first):
        counts, squares, live, *rows = refs
        only_live = _only_live(live, number, first, tokens)
        scale = 1.0 if squares is None else token_columns.inverse_rms(squares, d, eps)

        def store(values):
            before = values[0] * scale
            g = jnp.where(before == -jnp.inf, -0.0, rectifier.gate(before, x.dtype))
            g = only_live(g).astype(x.dtype).astype(jnp.float32)
            for w in rows:
                token_columns.prefetch_rows(w.at[number], first, g, batch)
            token_columns.store(outs[0], first, g)
            row = first // COLUMNS % counts.shape[1]
            open_gates.count(g, batch, counts.at[number, row])

        return store

    ring = TokenRing.of(x, (weight,), k_axis=2)
    call = _Call("token_gate", ring, finish, waits_first=True, live=2)
    prefetch = tuple(w.values if isinstance(w, Quantised) else w for w in prefetch)
    operands = x, weight, layer, squares, live, prefetch
    x, weight, layer, squares, live, prefetch = in_place.barrier(operands)
    further = [counts, squares, live, *prefetch]
    return in_place.barrier(call(x, (weight,), layer, further, [out])[0])


def add_product(
    h: jax.Array,
    weight: Operand,
    layer: jax.Array,
    x: jax.Array,
    scale: jax.Array,
    *,
    bias: jax.Array | None = None,
) -> Stream:
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

    def finish(refs, outs, number, first):
        before = token_columns.load(refs[0], first, tokens)
        if bias is not None:
            before += token_columns.load(refs[2].at[number], first, tokens)
        factor = token_columns.load(refs[1].at[number], first, tokens)

        def store(values):
            after = (before + values[0]).astype(x.dtype)
            token_columns.store(outs[0], first, after)
            after = after.astype(jnp.float32)
            token_columns.store(outs[1], first, after * factor)
            token_columns.store_sums(outs[2], first // token_columns.COLUMNS, after * after)

        return store

    k_axis = 2 if isinstance(weight, Quantised) else 1
    call = _Call("token_add_product", TokenRing.of(h, (weight,), k_axis=k_axis), finish)
    operands = [x, scale] + ([] if bias is None else [bias])
    return Stream(*call(h, (weight,), layer, operands, outs))


@dataclasses.dataclass(frozen=True)
class _Call:
    """A kernel that multiplies and then does what `finish` says.

    Attributes:
      name: the kernel's name.
      ring: the product.
      finish: called with references to the further operands and to the results, the layer, and the
        first of the block's 16 columns, while the products are on their way. It returns what is
        called with the finished sums: for each matrix of a block an array of `token_columns`.
      waits_first: whether the next kernel starts only after this one has waited for the kernel
        before, so that it can read that one's results at once.
      live: index of the further operand that says how many columns of each layer's matrices are
        multiplied, in whole tiles; the result is zero for other tiles. None if there is none; the
        operand may be None, too.
    """

    name: str
    ring: TokenRing
    finish: Callable
    waits_first: bool = False
    live: int | None = None

    def __call__(self, x, weights, layer, operands, outs):
        matrices = Matrices.of(weights, side_by_side=self.ring.side_by_side)
        read = [jax.ShapeDtypeStruct(w.shape[1:], w.dtype) for w in weights]  # of one layer
        flops = 2 * len(x) * sum(w.size for w in read)
        kernel = plgpu.kernel(
            functools.partial(_kernel, call=self, count=len(operands)),
            out_type=outs,
            scratch_types=dict(smem=self.ring.scratch()),
            grid=(self.ring.tiles,),
            grid_names=("tile",),
            cluster=(PARTS,),
            cluster_names=("part",),
            kernel_name=self.name,
            **versions.cost(flops, (x, *read, *outs)),
            compiler_params=plgpu.CompilerParams(
                lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
            ),
        )
        return kernel(x, layer, matrices, *operands)


def _only_live(live, number, first, tokens):
    """A function that sets those of 16 columns from `first` on to zero that are not live."""
    if live is None:
        return lambda values: values
    is_live = token_columns.are_before(live[number], first, tokens)
    return lambda values: jnp.where(is_live, values, 0.0)


def _kernel(x, layer, matrices, *refs, smem, call, count):
    (operands, outs), number = (refs[:count], refs[count:]), layer[0]
    product = Product(call.ring, x, matrices, number, lax.axis_index("tile"), smem)
    cluster.prepare(smem["arrived"])
    live = None if call.live is None else operands[call.live]

    def begin():
        if not call.waits_first:
            plgpu.griddepcontrol_launch_dependents()
        plgpu.griddepcontrol_wait()
        if call.waits_first:
            plgpu.griddepcontrol_launch_dependents()

    def multiply():
        is_8_bits = call.ring.is_8_bits
        if not is_8_bits:  # else the exchange of scales comes first
            product.expect()
        product.fetch_matrices()
        begin()
        scaled = product.with_scales()
        if is_8_bits:
            scaled.expect()
        scaled.fetch_tokens()
        store = call.finish(operands, outs, number, product.first_column)
        scaled.send()
        store(scaled.receive())

    def leave_out():
        begin()
        token_columns.store(outs[0], product.first_column, token_columns.zeros(x.shape[0]))

    if live is None:
        multiply()
    else:
        lax.cond(product.tile * COLUMNS < live[number], multiply, leave_out)

"""The block by the kernels of a back end: differentiable, under `vmap` and over a mesh.

Few tokens (decoding) have kernels of their own. So have some hundreds (short prompts), which are
dense. For more, the gate matmul packs its result in one of two formats. From TwELL, a second kernel
gathers the weights of each token's own neurons. From tile unions, two tensor-core matmuls compute
the neurons that any of 256 tokens uses. Heavy rows, which do not fit or would cost the others too
much, are listed for `dense_rows`. The host waits for nothing: where a sparse backward may go
several ways, the GPU chooses (docs/design/0009).
"""

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from pallas_kernels.kernels import BlockKernels
from pallas_kernels.rectifiers import Rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn import forwards, partition, unions, xla
from twell_jax.ffn.dense_gradients import with_gate_in_8_bits
from twell_jax.ffn.numeric import STANDARD
from twell_jax.ffn.partition import Share
from twell_jax.ffn.stats import FFNStats, Output
from twell_jax.ffn.union_lasso import TokenWindows, WindowGrid

RESIDUALS = "sparse_ffn"  # the residuals' name, for policies of `jax.checkpoint`

FORWARD = {
    "few_tokens": forwards.few_tokens,
    "dense_block": forwards.dense_block,
    "twell": forwards.twell,
    "unions": unions.forward,
}
_ADDING = ("unions",)  # those of them that add y to a residual themselves

# `f(x, weights, residual, *offset) -> y, stats` for `x: [M, D]`; y is added to `residual: [M, D]`,
# unless that is None.
type Block = Callable[..., tuple[jax.Array, FFNStats]]

_SHARES = {
    "y": Share.TOKENS,
    "nnz": Share.TOKENS,
    "l1": Share.SUM,
    "fired": Share.FIRED,
    "tiles": Share.NEURONS,
    "union": Share.MEAN,
    "listed": Share.MEAN,
    "lasso": Share.SUM,
}
_OUTPUT = Output._make(_SHARES[name] for name in Output._fields)
_OPERANDS = (Share.TOKENS, Share.NEURONS)  # x, weights


@functools.cache
def dense_gradients(
    kernels: BlockKernels,
    act: Rectifier,
    algorithm: str,
    few_under_vmap: int | None,
    in_8_bits: bool = False,
) -> Block:
    """The block by an algorithm of these kernels, with the gradients of `xla.ffn`.

    Args:
      kernels: the back end.
      act: the activation.
      algorithm: a key of `FORWARD`.
      few_under_vmap: None if the caller asks for kernels. Otherwise XLA computes on platforms other
        than CUDA, and under `vmap` the calls of fewer tokens than this.
      in_8_bits: as of `xla.ffn`, which computes the gradients. Kernels of unions then round the
        operands of the gate's product.
    """
    by_kernels = _forward(kernels, act, algorithm, in_8_bits)

    def dense(x, weights, residual):
        return xla.ffn(x, weights, activation=act, residual=residual, in_8_bits=in_8_bits)

    if few_under_vmap is None:
        compute = by_kernels
    else:

        def anywhere(*operands):
            return lax.platform_dependent(*operands, cuda=by_kernels, default=dense)

        # jit, so that in eager calls the platform of the operands decides.
        compute = jax.jit(partition.sequential_unless_few(anywhere, dense, few_under_vmap))
    compute = jax.custom_vjp(compute)
    compute.defvjp(
        STANDARD(lambda *operands: jax.vjp(dense, *operands)),
        STANDARD(lambda vjp, cotangent: vjp(cotangent)),
    )
    return compute


@functools.cache
def sparse_gradients(
    kernels: BlockKernels,
    act: Rectifier,
    capacity: float,
    grid: WindowGrid | None = None,
    in_8_bits: bool = False,
) -> Block:
    """The block on unions, with sparse gradients; forward-mode differentiation is not supported.

    If the pattern exceeds `capacity`, the gradients are computed densely; if lists are long, those
    for the weights (`residuals.dense_is_faster`).

    With `in_8_bits` the gate's product has operands of 8 bits in the forward.

    With a grid, the block takes its offset, int32 [], and the statistics have the lasso over its
    windows. Each device must have whole sequences.
    """
    the_same = () if grid is None else (Share.MEAN,)  # offset and gradient, on all devices
    forward_on_device = _on_devices(
        functools.partial(_forward_for_gradients, kernels, act, capacity, grid, in_8_bits),
        (*_OPERANDS, Share.TOKENS, *the_same),
        (_OUTPUT, Share.MEAN, Share.OWN),
    )
    backward_on_device = _on_devices(
        functools.partial(unions.backward, kernels, act, capacity=capacity, in_8_bits=in_8_bits),
        (Share.OWN, *_OPERANDS, Share.TOKENS, Share.MEAN, *the_same),
        _OPERANDS,
    )

    @STANDARD
    def forward(x, weights, residual, *offset):
        # Each part of the neurons would add the residual.
        added = residual if partition.devices().neurons == 1 else None
        output, overflow, residuals = forward_on_device(x, _by_device(weights), added, *offset)
        # x too: a policy that keeps what matmuls make would compute it again, for this block alone.
        kept = jax.tree.map(lambda a: checkpoint_name(a, RESIDUALS), (residuals, x))
        y, stats = output.with_stats(overflow)
        is_there = None if residual is None else ()
        return (y if added is residual else xla.add(residual, y), stats), (*kept, weights, is_there)

    @STANDARD
    def backward(kept, cotangent):
        (residuals, x, weights, is_there), (dy, stats) = kept, cotangent
        # Both are means over tokens.
        penalties = [a / dy.shape[0] for a in (stats.l1, stats.lasso) if a is not None]
        grads = backward_on_device(residuals, x, _by_device(weights), dy, *penalties)
        return *grads, None if is_there is None else dy, *(None for _ in the_same)

    compute = jax.custom_vjp(
        _forward(kernels, act, "unions", in_8_bits)
        if grid is None
        else lambda *operands: forward(*operands)[0]
    )
    compute.defvjp(forward, backward)
    return compute


def _forward(kernels: BlockKernels, act: Rectifier, algorithm: str, in_8_bits: bool) -> Block:
    forward = functools.partial(FORWARD[algorithm], kernels, act)
    alone = _on_devices(forward, _OPERANDS, _OUTPUT)
    adding = _on_devices(forward, (*_OPERANDS, Share.TOKENS), _OUTPUT)

    def with_stats(x, weights, residual):
        if in_8_bits and algorithm == "unions":
            weights = with_gate_in_8_bits(weights)
        # Each part of the neurons would add the residual.
        adds = algorithm in _ADDING and partition.devices().neurons == 1
        if residual is not None and adds:
            return adding(x, _by_device(weights), residual).with_stats()
        y, stats = alone(x, _by_device(weights)).with_stats()
        return xla.add(residual, y), stats

    return with_stats


def _by_device(weights: Weights) -> Weights:
    """The weights with a number of live neurons for each device that the neurons are split over."""
    return weights.live_in_parts(partition.devices().neurons)


def _forward_for_gradients(kernels, act, capacity, grid, in_8_bits, x, weights, residual, *offset):
    windows = TokenWindows.of(grid, *offset, len(x)) if offset else None
    output, residuals = unions.forward_with_residuals(
        kernels, act, x, weights, residual, windows, capacity=capacity, in_8_bits=in_8_bits
    )
    return output, residuals.overflow, residuals


def _on_devices(function, inputs, outputs):
    # One call fills the GPU, and weights may differ, so `vmap` runs one call after the other.
    return partition.over_mesh(sequential_vmap(function), inputs, outputs)

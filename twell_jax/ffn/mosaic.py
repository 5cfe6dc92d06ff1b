"""The block by the kernels of a back end: differentiable, under `vmap` and over a mesh.

Few tokens (decoding) have kernels of their own. So have 65 to 1023 (short prompts), which are
dense. For more, the gate matmul packs its result in one of two formats. From TwELL, a second kernel
gathers the weights of each token's own neurons. From tile unions, two tensor-core matmuls compute
the neurons that any of 256 tokens uses. Heavy rows, which do not fit or would cost the others too
much, are listed for `dense_rows`. The host waits for nothing: where a sparse backward may go
several ways, the GPU chooses (docs/design/0011).
"""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.custom_batching import sequential_vmap

from pallas_kernels.kernels import Kernels
from pallas_kernels.rectifiers import Rectifier, rectifier
from pallas_kernels.weights import Weights
from twell_jax.ffn import dense_block, few_tokens, partition, twell, unions, xla
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.partition import Share
from twell_jax.ffn.stats import FFNStats, Output
from twell_jax.ffn.union_lasso import Cells, Grid

RESIDUALS = "sparse_ffn"  # the residuals' name, for policies of `jax.checkpoint`

FORWARD = {
    "few_tokens": few_tokens.forward,
    "dense_block": dense_block.forward,
    "twell": twell.forward,
    "unions": unions.forward,
}
_ADDING = ("unions",)  # those of them that add y to a residual themselves

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
    kernels: Kernels,
    activation: Activation,
    threshold: float,
    algorithm: str,
    few_under_vmap: int | None,
) -> Block:
    """`f(x, weights, residual) -> y, stats` for `x: [M, D]`, with the gradients of `xla.ffn`.

    y is added to `residual: [M, D]`, unless that is None.

    Args:
      kernels: the back end.
      activation, threshold: of a rectifier.
      algorithm: a key of `FORWARD`.
      few_under_vmap: None if the caller asks for kernels. Otherwise XLA computes on platforms other
        than CUDA, and under `vmap` the calls of fewer tokens than this.
    """
    act = rectifier(activation, threshold)
    assert act is not None, activation  # the rule would have been excluded
    by_kernels = _forward(kernels, act, algorithm)

    def dense(x, weights, residual):
        return xla.ffn(x, weights, activation=activation, threshold=threshold, residual=residual)

    if few_under_vmap is None:
        compute = by_kernels
    else:

        def anywhere(*operands):
            return lax.platform_dependent(*operands, cuda=by_kernels, default=dense)

        # jit, so that in eager calls the platform of the operands decides.
        compute = jax.jit(partition.sequential_unless_few(anywhere, dense, few_under_vmap))
    compute = jax.custom_vjp(compute)
    compute.defvjp(
        lambda *operands: jax.vjp(dense, *operands), lambda vjp, cotangent: vjp(cotangent)
    )
    return compute


@functools.cache
def sparse_gradients(
    kernels: Kernels, act: Rectifier, capacity: float, cells: Cells | None = None
) -> Block:
    """`f(x, weights) -> y, stats` on unions for `x: [M, D]`, with sparse gradients.

    If the pattern exceeds `capacity`, or is crowded (`unions.is_crowded`), the gradients are
    computed densely. Forward-mode differentiation is not supported.

    With cells, it is `f(x, weights, offset)`, and the statistics have the lasso over the windows
    with this offset, int32 []. Each device must have whole sequences.
    """
    the_same = () if cells is None else (Share.MEAN,)  # offset and gradient, on all devices
    forward_on_device = _on_devices(
        functools.partial(_forward_for_gradients, kernels, act, capacity, cells),
        (*_OPERANDS, *the_same),
        (_OUTPUT, Share.MEAN, Share.OWN),
    )
    backward_on_device = _on_devices(
        functools.partial(unions.backward, kernels, act, capacity=capacity),
        (Share.OWN, *_OPERANDS, Share.TOKENS, Share.MEAN, *the_same),
        _OPERANDS,
    )

    def forward(x, weights, *offset):
        output, overflow, residuals = forward_on_device(x, _by_device(weights), *offset)
        # x too: a policy that keeps what matmuls make would compute it again, for this block alone.
        kept = jax.tree.map(lambda a: checkpoint_name(a, RESIDUALS), (residuals, x))
        return output.with_stats(overflow), (*kept, weights)

    def backward(kept, cotangent):
        (residuals, x, weights), (dy, stats) = kept, cotangent
        # Both are means over tokens.
        penalties = [a / dy.shape[0] for a in (stats.l1, stats.lasso) if a is not None]
        grads = backward_on_device(residuals, x, _by_device(weights), dy, *penalties)
        return (*grads, *(None for _ in the_same))

    without_gradients = _forward(kernels, act, "unions")
    compute = jax.custom_vjp(
        (lambda x, weights: without_gradients(x, weights, None))
        if cells is None
        else lambda *operands: forward(*operands)[0]
    )
    compute.defvjp(forward, backward)
    return compute


def _forward(kernels: Kernels, act: Rectifier, algorithm: str) -> Block:
    forward = functools.partial(FORWARD[algorithm], kernels, act)
    alone = _on_devices(forward, _OPERANDS, _OUTPUT)
    adding = _on_devices(forward, (*_OPERANDS, Share.TOKENS), _OUTPUT)

    def with_stats(x, weights, residual):
        _, parts = partition.devices()  # each of which would add the residual
        if residual is not None and algorithm in _ADDING and parts == 1:
            return adding(x, _by_device(weights), residual).with_stats()
        y, stats = alone(x, _by_device(weights)).with_stats()
        return xla.add(residual, y), stats

    return with_stats


def _by_device(weights: Weights) -> Weights:
    """The weights with a number of live neurons for each device that the neurons are split over."""
    _, devices = partition.devices()
    return weights.live_in_parts(devices)


def _forward_for_gradients(kernels, act, capacity, cells, x, weights, *offset):
    grid = Grid.of(cells, *offset, len(x)) if offset else None
    output, residuals = unions.forward_with_residuals(
        kernels, act, x, weights, grid, capacity=capacity
    )
    overflow = residuals.way[0] == unions.Way.AGAIN
    return output, overflow.astype(jnp.float32), residuals


def _on_devices(function, inputs, outputs):
    # One call fills the GPU, and weights may differ, so `vmap` runs one call after the other.
    return partition.over_mesh(sequential_vmap(function), inputs, outputs)

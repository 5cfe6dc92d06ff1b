"""`sparse_ffn` on Hopper GPUs: the Pallas kernels.

Few tokens (decoding) go through `small_m`. Otherwise the gate matmul packs its result in one of two
formats. Behind TwELL a second kernel gathers the weights of each token's own neurons; behind tile
unions two tensor-core matmuls take the neurons that any of 256 tokens uses. Either way heavy rows,
which would not fit or would cost the others too much, are listed for `dense_rows`. The host waits
for nothing, but before a sparse backward for whether its pattern fits.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import PartitionSpec

from pallas_kernels import in_place
from pallas_kernels.hopper import operands
from pallas_kernels.hopper.dense_rows import dense_rows
from pallas_kernels.hopper.few_tokens import MAX_TOKENS, small_m_ffn
from pallas_kernels.hopper.fused_ffn import fused_ffn
from pallas_kernels.hopper.gate_pack import gate_pack
from pallas_kernels.layouts import twell
from twell_jax.ffn import unions as ffn_unions
from twell_jax.ffn import xla as ffn_xla
from twell_jax.ffn.xla import FFNStats
from twell_jax.models import sharding

Form = Literal["twell", "unions"]

TENSOR = "tensor"  # the axis of a mesh over which neurons are split, not tokens
KEPT = "sparse_ffn"  # to policies of `jax.checkpoint`, what the forward keeps for sparse gradients

# Where the kernels beat XLA (docs/performance.md): up to so many tokens while no larger share of
# gates is open, and on tile unions, where dense gates cost next to nothing, from so many tokens on.
# Without a gate one of two matmuls can be sparse, not two of three: they pay for fewer open ones.
_FEW_TOKENS = ((32, 0.05), (MAX_TOKENS, 0.02))
_MANY_TOKENS = 1024
_MOST_OPEN_WITHOUT_GATE = 0.01
_HOPPER = ("H100", "H20", "H800")  # H200, too; in the name of a device of compute capability 9.0


def obstacle(x, w_gate, w_up, w_down, *, b_gate, b_up, b_down, activation) -> str | None:
    """Why the kernels cannot serve these inputs here, in words; None if they can."""
    if activation != "relu":
        return f"the activation must be relu, got {activation}"
    if any(b is not None for b in (b_gate, b_up, b_down)):
        return "the kernels add no biases"
    try:
        operands.check_weight("w_down", w_down)  # the others have its shape and dtype
    except ValueError as error:
        return str(error)
    return _no_hopper() or _no_split(x, w_down)


def is_faster(
    x: jax.Array, w_gate: jax.Array | None, w_down: jax.Array, expected_nnz: float | None
) -> bool:
    """Whether the kernels win if each token opens so many gates; None for an unknown number."""
    tokens = _tokens_of_a_device(x)
    for most_tokens, most_open in _FEW_TOKENS:
        if tokens <= most_tokens:
            return expected_nnz is None or expected_nnz <= most_open * len(w_down)
    if tokens < _MANY_TOKENS:
        return False
    if w_gate is not None:
        return True
    return expected_nnz is not None and expected_nnz <= _MOST_OPEN_WITHOUT_GATE * len(w_down)


def ffn(
    x, w_gate, w_up, w_down, *, form: Form | None, anywhere: bool, gradient_capacity: float
) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` where `obstacle` finds none.

    Behind unions the gradients are sparse, too, unless `anywhere`; else, and if they exceed their
    capacity, they are those of the dense computation. There is no forward-mode differentiation.

    Args:
      x, w_gate, w_up, w_down: as in `sparse_ffn`.
      form: of the packed gate of more than 64 tokens; None for unions from 1024 tokens on, else
        TwELL.
      anywhere: compute densely on devices without CUDA, and few tokens under `vmap`.
      gradient_capacity: as in `sparse_ffn`.
    """
    tokens = _tokens_of_a_device(x)
    form = form or ("unions" if tokens >= _MANY_TOKENS else "twell")
    if form == "unions" and tokens > MAX_TOKENS and not anywhere:
        compute = _compute_with_sparse_grads(gradient_capacity)
    else:
        compute = _compute(form, anywhere)
    y, stats = compute(x.reshape(-1, x.shape[-1]), w_gate, w_up, w_down)
    return y.reshape(x.shape), stats


@functools.cache
def _compute(form: Form, anywhere: bool):
    kernels = _forward(form)

    def compute(*operands):
        if not anywhere:
            return kernels(*operands)
        return lax.platform_dependent(*operands, cuda=kernels, default=ffn_xla.ffn)

    if anywhere:
        # Under jit the platform of the operands counts where nothing else is compiled.
        compute = jax.jit(_mapped_in_turn(compute, few=ffn_xla.ffn))
    compute = jax.custom_vjp(compute)
    compute.defvjp(
        lambda *operands: jax.vjp(ffn_xla.ffn, *operands), lambda vjp, cotangent: vjp(cotangent)
    )
    return compute


@functools.cache
def _compute_with_sparse_grads(capacity: float):
    def kept_forward(*operands):
        *out, kept = ffn_unions.forward(*operands, capacity=capacity)
        return *out, 1.0 - kept.fits[0].astype(jnp.float32), kept

    def forward(*operands):
        *out, kept = _on_gpu(kept_forward, *_KEPT_FORWARD)(*operands)
        kept = jax.tree.map(functools.partial(checkpoint_name, name=KEPT), kept)
        return _with_stats(*out), (kept, operands)

    def backward(residuals, cotangent):
        (kept, operands), (dy, stats) = residuals, cotangent
        l1_grad = stats.l1 / dy.shape[0]  # l1 is a mean over tokens
        return _on_gpu(ffn_unions.backward, *_BACKWARD)(kept, *operands, dy, l1_grad)

    compute = jax.custom_vjp(_forward("unions"))
    compute.defvjp(forward, backward)
    return compute


def _forward(form: Form):
    kernels = _on_gpu(functools.partial(_ffn, form=form), *_FORWARD)
    return lambda *operands: _with_stats(*kernels(*operands))


# What a device of a mesh has of an operand or result, in parts along its first axis.
_TOKENS = "tokens"  # of its tokens, all; a result is what its neurons contribute
_NEURONS = "neurons"  # of its neurons, all; a result is what its tokens contribute
_FIRED = "fired"  # as before, of truth values
_SUM, _MEAN = "sum", "mean"  # a number, of its tokens and neurons
_OWN = "own"  # what no other device has to do with
_FORWARD = (_TOKENS, *3 * [_NEURONS]), (_TOKENS, _TOKENS, _SUM, _FIRED)
_KEPT_FORWARD = _FORWARD[0], (*_FORWARD[1], _MEAN, _OWN)
_BACKWARD = (_OWN, *_FORWARD[0], _TOKENS, _MEAN), (_TOKENS, *3 * [_NEURONS])


def _on_gpu(function, inputs, outputs):
    """`function`, of kernels, under `vmap` and over a mesh, with what devices have of its operands.

    Each device of the current mesh takes its share of the tokens and, over an axis that is named
    "tensor", of the neurons.
    """
    function = _mapped_in_turn(function)

    def split(*operands):
        axes = sharding.auto_axes()
        if not axes:
            return function(*operands)
        neurons = tuple(axis for axis in axes if axis == TENSOR)
        tokens = tuple(axis for axis in axes if axis != TENSOR)
        spec = {
            _TOKENS: PartitionSpec(tokens),
            _NEURONS: PartitionSpec(neurons),
            _FIRED: PartitionSpec(neurons),
            _OWN: PartitionSpec(axes),
        }
        merge = {
            _TOKENS: lambda a: lax.psum(a, neurons),
            _NEURONS: lambda a: lax.psum(a, tokens),
            _FIRED: lambda a: lax.pmax(a.astype(jnp.int32), tokens) > 0,
            _SUM: lambda a: lax.psum(a, axes),
            _MEAN: lambda a: lax.pmean(a, axes),
            _OWN: lambda a: a,
        }

        def local(*operands):
            return tuple(merge[o](a) for o, a in zip(outputs, function(*operands), strict=True))

        return jax.shard_map(
            local,
            in_specs=tuple(spec.get(i, PartitionSpec()) for i in inputs),
            out_specs=tuple(spec.get(o, PartitionSpec()) for o in outputs),
            axis_names=set(axes),
            check_vma=False,
        )(*operands)

    return split


def _mapped_in_turn(function, few=None):
    """Under `vmap`, one call after the other: the kernels fill the GPU, and weights may differ.

    Calls of too few tokens to fill it are mapped over `few` instead, if given.
    """
    function = jax.custom_batching.custom_vmap(function)

    @function.def_vmap
    def _(size, is_batched, *operands):
        if few and operands[0].shape[-2] < _MANY_TOKENS:
            axes = jax.tree.map(lambda batched: 0 if batched else None, is_batched)
            out = jax.vmap(few, in_axes=tuple(axes))(*operands)
            return out, jax.tree.map(lambda _: True, out)
        leaves, tree = jax.tree.flatten(operands)
        is_batched = jax.tree.leaves(is_batched)

        def call(mapped):
            mapped = iter(mapped)
            pairs = zip(leaves, is_batched, strict=True)
            return function(*tree.unflatten(next(mapped) if b else a for a, b in pairs))

        mapped = [a for a, batched in zip(leaves, is_batched, strict=True) if batched]
        out = lax.map(call, mapped)
        return out, jax.tree.map(lambda _: True, out)

    return function


def _ffn(x, w_gate, w_up, w_down, *, form):
    if x.shape[0] <= MAX_TOKENS:
        y, nnz, l1, fired = small_m_ffn(x, w_gate, w_up, w_down)
        return y, nnz, jnp.sum(l1), fired
    forward = {"twell": _twell_ffn, "unions": ffn_unions.forward}[form]
    return forward(x, w_gate, w_up, w_down)


def _twell_ffn(x, w_gate, w_up, w_down):
    w_first, w_second = (w_up, None) if w_gate is None else (w_gate, w_up)
    packed = gate_pack(x, w_first)
    y, nnz, l1, heavy = fused_ffn(x, packed, w_second, w_down)
    y_ref = in_place.mutable(y)
    heavy_l1, heavy_fired = dense_rows(*heavy, w_gate, w_up, w_down, y_ref)
    fired = twell.fired(packed, w_down.shape[0]) | heavy_fired
    return in_place.contents(y_ref), nnz, jnp.sum(l1) + heavy_l1, fired


def _with_stats(y, nnz, l1, fired, overflow=0.0):
    return y, FFNStats(
        l1=l1 / nnz.size,
        nnz=jnp.mean(nnz, dtype=jnp.float32),
        max_nnz=jnp.max(nnz),
        fired=fired,
        overflow=jnp.asarray(overflow, jnp.float32),
    )


def _devices() -> tuple[int, int]:
    """Over how many devices tokens and neurons would have to be split at this place."""
    mesh = jax.sharding.get_abstract_mesh()
    sizes = {axis: size for axis, size in mesh.shape.items() if axis not in mesh.manual_axes}
    neurons = sizes.pop(TENSOR, 1)
    return math.prod(sizes.values()), neurons


def _tokens_of_a_device(x):
    return x.size // x.shape[-1] // _devices()[0]


def _no_hopper() -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:  # lowering for a device that need not be here
        kind = device.device_kind
        is_hopper = any(name in kind for name in _HOPPER)
    else:
        device = jax.config.jax_default_device or jax.devices()[0]
        if isinstance(device, str):
            device = jax.devices(device)[0]
        kind = device.device_kind
        is_hopper = device.platform == "gpu" and device.compute_capability == "9.0"
    return None if is_hopper else f"it needs a Hopper GPU, got {kind}"


def _no_split(x: jax.Array, w_down: jax.Array) -> str | None:
    mesh, tokens = jax.sharding.get_abstract_mesh(), x.size // x.shape[-1]
    for_tokens, for_neurons = _devices()
    if for_tokens * for_neurons > 1 and mesh.explicit_axes:
        return "XLA cannot partition the kernels over this mesh; call it inside shard_map"
    if tokens % for_tokens:
        return f"{tokens} tokens do not divide over {for_tokens} devices"
    if len(w_down) % (128 * for_neurons):
        return f"{len(w_down)} neurons are no multiple of 128 on each of {for_neurons} devices"
    return None

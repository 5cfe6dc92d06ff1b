"""`sparse_ffn` on Hopper GPUs: the Pallas kernels.

Few tokens (decoding) go through `small_m`. Otherwise the gate matmul packs its result in one of two
formats. Behind TwELL a second kernel gathers the weights of each token's own neurons; behind tile
unions two tensor-core matmuls take the neurons that any of 256 tokens uses. Either way heavy rows,
which would not fit or would cost the others too much, are listed for `dense_rows`. The host waits
for nothing.
"""

import functools
from typing import Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.sharding import AxisType, PartitionSpec

from pallas_kernels import operands, tile_union, twell
from pallas_kernels.dense_rows import dense_rows
from pallas_kernels.fused_ffn import fused_ffn
from pallas_kernels.gate_pack import gate_pack
from pallas_kernels.gate_union import gate_union
from pallas_kernels.small_m import MAX_TOKENS, small_m_ffn
from pallas_kernels.union_down import union_down
from pallas_kernels.union_plan import union_plan
from pallas_kernels.union_up import union_up
from twell_jax import ffn_xla
from twell_jax.ffn_xla import FFNStats

Form = Literal["twell", "unions"]

_MANY_TOKENS = 1024  # from here on tile unions beat XLA on patterns of trained models
_HOPPER = ("H100", "H200", "H800")  # in the name of a device of compute capability 9.0


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
    return _no_hopper() or _no_split(x)


def is_faster(x: jax.Array) -> bool:
    """Whether the kernels win at this number of tokens; for few, if some 1 % of gates are open."""
    tokens = x.size // x.shape[-1] // _devices()
    return tokens <= MAX_TOKENS or tokens >= _MANY_TOKENS


def ffn(
    x, w_gate, w_up, w_down, *, form: Form | None, anywhere: bool
) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` where `obstacle` finds none.

    Differentiated, it is the dense computation, forward included, since gradients need all of h;
    there is no forward-mode differentiation.

    Args:
      x, w_gate, w_up, w_down: as in `sparse_ffn`.
      form: of the packed gate of more than 64 tokens; None for the one that is faster on
        patterns of trained models.
      anywhere: compute densely on devices without CUDA.
    """
    x_2d = x.reshape(-1, x.shape[-1])
    form = form or ("unions" if x_2d.shape[0] // _devices() >= _MANY_TOKENS else "twell")
    y, stats = _compute(form, anywhere)(x_2d, w_gate, w_up, w_down)
    return y.reshape(x.shape), stats


@functools.cache
def _compute(form: Form, anywhere: bool):
    kernels = _split_over_mesh(_mapped_in_turn(functools.partial(_ffn, form=form)))

    def compute(*operands):
        if not anywhere:
            return kernels(*operands)
        return lax.platform_dependent(*operands, cuda=kernels, default=ffn_xla.ffn)

    # Under jit the platform of the operands counts where nothing else is compiled.
    compute = jax.custom_vjp(jax.jit(compute) if anywhere else compute)
    compute.defvjp(
        lambda *operands: jax.vjp(ffn_xla.ffn, *operands), lambda vjp, cotangent: vjp(cotangent)
    )
    return compute


def _split_over_mesh(function):
    """Each device of the current mesh takes its share of the tokens, and all of the weights."""

    def split(x, *weights):
        if _devices() == 1:
            return function(x, *weights)
        axes = jax.sharding.get_abstract_mesh().axis_names

        def local(*operands):
            y, stats = function(*operands)
            mean, most = (functools.partial(f, axis_name=axes) for f in (lax.pmean, lax.pmax))
            fired = most(stats.fired.astype(jnp.int32)) > 0
            return y, FFNStats(mean(stats.l1), mean(stats.nnz), most(stats.max_nnz), fired)

        tokens, whole = PartitionSpec(axes), PartitionSpec()
        specs = {"in_specs": (tokens, whole, whole, whole), "out_specs": (tokens, whole)}
        return jax.shard_map(local, **specs, check_vma=False)(x, *weights)

    return split


def _mapped_in_turn(function):
    """Under `vmap`, one call after the other: the kernels fill the GPU, and weights may differ."""
    function = jax.custom_batching.custom_vmap(function)

    @function.def_vmap
    def _(size, is_batched, *operands):
        def call(mapped):
            mapped = iter(mapped)
            pairs = zip(operands, is_batched, strict=True)
            return function(*(next(mapped) if batched else a for a, batched in pairs))

        mapped = [a for a, batched in zip(operands, is_batched, strict=True) if batched]
        out = lax.map(call, mapped)
        return out, jax.tree.map(lambda _: True, out)

    return function


def _ffn(x, w_gate, w_up, w_down, *, form):
    if x.shape[0] <= MAX_TOKENS:
        y, nnz, l1, fired = small_m_ffn(x, w_gate, w_up, w_down)
        return y, _stats(nnz, jnp.sum(l1), fired)
    packed_ffn = {"twell": _twell_ffn, "unions": _union_ffn}[form]
    w_first, w_second = (w_up, None) if w_gate is None else (w_gate, w_up)
    y, nnz, l1, fired, heavy = packed_ffn(x, w_first, w_second, w_down)
    # y may have padding rows, which are cut last: XLA would hand a slice to the in-place kernel as
    # a part of the larger buffer, and take the result from another one.
    y_ref = jax.new_ref(y)
    heavy_l1, heavy_fired = dense_rows(*heavy, w_gate, w_up, w_down, y_ref)
    return y_ref[...][: x.shape[0]], _stats(nnz, l1 + heavy_l1, fired | heavy_fired)


def _twell_ffn(x, w_first, w_second, w_down):
    packed = gate_pack(x, w_first)
    y, nnz, l1, heavy = fused_ffn(x, packed, w_second, w_down)
    return y, nnz, jnp.sum(l1), twell.fired(packed, w_down.shape[0]), heavy


def _union_ffn(x, w_first, w_second, w_down):
    gate, masks, counts = gate_union(x, w_first)
    gate_ref = jax.new_ref(gate)
    plan, nnz, heavy = union_plan(x, gate_ref, masks, counts)
    h, l1 = union_up(x, gate_ref[...], w_second, plan)
    y = union_down(h, w_down, plan, x.shape[0])
    return y, nnz, l1, tile_union.fired(masks), heavy


def _stats(nnz, l1, fired):
    return FFNStats(l1 / nnz.size, jnp.mean(nnz, dtype=jnp.float32), jnp.max(nnz), fired)


def _devices() -> int:
    """Over how many devices XLA would have to partition a computation at this place."""
    mesh = jax.sharding.get_abstract_mesh()
    return 1 if mesh.empty or mesh.are_all_axes_manual else mesh.size


def _no_hopper() -> str | None:
    device = jax.sharding.get_abstract_mesh().abstract_device
    if device is not None:  # lowering for a device that need not be here
        kind = device.device_kind
        is_hopper = any(name in kind for name in _HOPPER)
    else:
        device = jax.config.jax_default_device or jax.devices()[0]
        kind = device.device_kind
        is_hopper = device.platform == "gpu" and device.compute_capability == "9.0"
    return None if is_hopper else f"it needs a Hopper GPU, got {kind}"


def _no_split(x: jax.Array) -> str | None:
    mesh, tokens = jax.sharding.get_abstract_mesh(), x.size // x.shape[-1]
    if _devices() > 1 and any(kind != AxisType.Auto for kind in mesh.axis_types):
        return "XLA cannot partition the kernels over this mesh; call it inside shard_map"
    if tokens % _devices():
        return f"{tokens} tokens do not divide over {_devices()} devices"
    return None

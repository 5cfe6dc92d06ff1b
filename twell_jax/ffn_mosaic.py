"""`sparse_ffn` on Hopper GPUs: the Pallas kernels.

Few tokens (decoding) go through `small_m`. Otherwise the gate matmul packs its result as TwELL and
a second kernel does the rest, except for heavy rows, of which a tile has more entries than TwELL
holds: these it lists for `dense_rows`. The host waits for nothing.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import operands, twell
from pallas_kernels.dense_rows import dense_rows
from pallas_kernels.fused_ffn import fused_ffn
from pallas_kernels.gate_pack import gate_pack
from pallas_kernels.small_m import MAX_TOKENS, small_m_ffn
from twell_jax import ffn_xla
from twell_jax.ffn_xla import FFNStats

_MANY_TOKENS = 512
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
    return _no_hopper() or _no_single_device()


def is_faster(x: jax.Array) -> bool:
    """Whether the kernels win at this number of tokens if about 1 % of the gates are open."""
    tokens = x.size // x.shape[-1]
    return tokens <= MAX_TOKENS or tokens >= _MANY_TOKENS


def ffn(x, w_gate, w_up, w_down, *, anywhere: bool) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` where `obstacle` finds none; if `anywhere`, densely for devices without CUDA.

    Differentiated, it is the dense computation, forward included, since gradients need all of h;
    there is no forward-mode differentiation.
    """
    compute = _anywhere if anywhere else _on_cuda
    y, stats = compute(x.reshape(-1, x.shape[-1]), w_gate, w_up, w_down)
    return y.reshape(x.shape), stats


def _densely_differentiated(compute):
    compute = jax.custom_vjp(compute)
    compute.defvjp(
        lambda *operands: jax.vjp(ffn_xla.ffn, *operands), lambda vjp, cotangent: vjp(cotangent)
    )
    return compute


@_densely_differentiated
def _on_cuda(*operands):
    return _ffn(*operands)


@_densely_differentiated
@jax.jit  # for the platform of the operands to count outside of jit too
def _anywhere(*operands):
    return jax.lax.platform_dependent(*operands, cuda=_ffn, default=ffn_xla.ffn)


@jax.custom_batching.custom_vmap
def _ffn(x, w_gate, w_up, w_down):
    if x.shape[0] <= MAX_TOKENS:
        y, nnz, l1, fired = small_m_ffn(x, w_gate, w_up, w_down)
        return y, _stats(nnz, jnp.sum(l1), fired)
    packed = gate_pack(x, w_up if w_gate is None else w_gate)
    y, nnz, l1, heavy = fused_ffn(x, packed, None if w_gate is None else w_up, w_down)
    y_ref = jax.new_ref(y)
    heavy_l1, heavy_fired = dense_rows(*heavy, w_gate, w_up, w_down, y_ref)
    fired = twell.fired(packed, w_down.shape[0]) | heavy_fired
    return y_ref[...], _stats(nnz, jnp.sum(l1) + heavy_l1, fired)


@_ffn.def_vmap
def _(size, is_batched, *operands):
    # One call after the other: the kernels fill the GPU, and weights may differ between calls.
    def call(mapped):
        mapped = iter(mapped)
        return _ffn(*(next(mapped) if b else a for a, b in zip(operands, is_batched, strict=True)))

    mapped = [a for a, b in zip(operands, is_batched, strict=True) if b]
    out = jax.lax.map(call, mapped)
    return out, jax.tree.map(lambda _: True, out)


def _stats(nnz, l1, fired):
    return FFNStats(l1 / nnz.size, jnp.mean(nnz, dtype=jnp.float32), jnp.max(nnz), fired)


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


def _no_single_device() -> str | None:
    mesh = jax.sharding.get_abstract_mesh()
    if mesh.empty or mesh.size == 1 or mesh.are_all_axes_manual:
        return None
    return "XLA cannot partition the kernels over a mesh; call it inside shard_map"

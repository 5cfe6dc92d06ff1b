"""`sparse_ffn` on Hopper GPUs: the Pallas kernels, and the dense path of rows that do not fit them.

Few tokens (decoding) go through `small_m`. Otherwise the gate matmul packs its result as TwELL and
a second kernel does the rest, except for heavy rows, of which a tile has more entries than TwELL
holds, and rows that are not finite: these are computed densely, in as many chunks as it takes, or
all rows at once where many are such.
"""

import jax
import jax.numpy as jnp

from pallas_kernels import operands, twell
from pallas_kernels.fused_ffn import fused_ffn
from pallas_kernels.gate_pack import gate_pack
from pallas_kernels.small_m import MAX_TOKENS, small_m_ffn
from twell_jax import ffn_xla
from twell_jax.ffn_xla import FFNStats

_HOPPER = ("H100", "H200", "H800")  # in the name of a device of compute capability 9.0
_DENSE_ROWS = 256  # computed at once: as long as the weights come from memory, fewer cost the same
_MANY = 4  # with more than M / 4 dense rows, computing all M at once is cheaper


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


def ffn(x, w_gate, w_up, w_down) -> tuple[jax.Array, FFNStats]:
    """`sparse_ffn` where `obstacle` finds none.

    Differentiated, it is the dense computation, forward included, since gradients need all of h;
    there is no forward-mode differentiation.
    """
    y, stats = _ffn(x.reshape(-1, x.shape[-1]), w_gate, w_up, w_down)
    return y.reshape(x.shape), stats


@jax.custom_vjp
def _ffn(*operands):
    return _ffn_batched(*operands)


_ffn.defvjp(
    lambda *operands: jax.vjp(ffn_xla.ffn, *operands), lambda vjp, cotangent: vjp(cotangent)
)


@jax.custom_batching.custom_vmap
def _ffn_batched(x, w_gate, w_up, w_down):
    # The kernels skip neurons whose gate is zero. In the dense computation 0 * inf makes NaN.
    finite = jnp.all(jnp.isfinite(x), axis=-1)
    if x.shape[0] <= MAX_TOKENS:
        y, nnz, l1, fired = small_m_ffn(x, w_gate, w_up, w_down)
        y, l1 = jnp.where(finite[:, None], y, jnp.nan), jnp.where(finite, l1, jnp.nan)
        return y, _stats(nnz, l1, fired)
    gated = w_gate is not None
    packed = gate_pack(x, w_gate if gated else w_up)
    y, nnz, l1 = fused_ffn(*((x, packed, w_up) if gated else (None, packed, None)), w_down)
    is_dense = (nnz < 0) | ~finite
    fired = twell.fired(packed, w_down.shape[0])
    light = _stats(jnp.where(nnz < 0, ~nnz, nnz), jnp.where(is_dense, 0, l1), fired)
    return _add_dense_rows(is_dense, y, light, x, w_gate, w_up, w_down)


@_ffn_batched.def_vmap
def _(size, is_batched, *operands):
    # One call after the other: the kernels fill the GPU, and weights may differ between calls.
    def call(mapped):
        mapped = iter(mapped)
        return _ffn_batched(
            *(next(mapped) if b else a for a, b in zip(operands, is_batched, strict=True))
        )

    mapped = [a for a, b in zip(operands, is_batched, strict=True) if b]
    out = jax.lax.map(call, mapped)
    return out, jax.tree.map(lambda _: True, out)


def _add_dense_rows(is_dense, y, stats, x, *weights):
    """Computes the rows of y that `is_dense: bool [M]` marks, and adds their part of the stats."""
    m = x.shape[0]

    def update(result, all_rows, some_rows):
        def compute(carry):
            return jax.lax.cond(jnp.sum(carry[0]) > m // _MANY, compute_all, compute_some, carry)

        def compute_all(carry):
            return jnp.zeros_like(is_dense), all_rows(ffn_xla.ffn(x, *weights))

        def compute_some(carry):
            left, result = carry
            (rows,) = jnp.nonzero(left, size=min(_DENSE_ROWS, m), fill_value=m)
            chunk = x.at[rows].get(mode="fill", fill_value=0)  # a row of zeros fires nothing
            result = some_rows(result, rows, ffn_xla.ffn(chunk, *weights))
            return left.at[rows].set(False, mode="drop"), result

        # A loop that need not run at all leaves y where it is; a `cond` around it would copy y.
        return jax.lax.while_loop(lambda carry: jnp.any(carry[0]), compute, (is_dense, result))[1]

    def set_rows(y, rows, computed):
        return y.at[rows].set(computed[0], mode="drop")

    def add_stats(totals, rows, computed):
        (l1, fired), more = totals, computed[1]
        return l1 + more.l1 * (rows.size / m), fired | more.fired

    # Two loops, so that XLA drops the one for the stats where nobody asks for them.
    y = update(y, lambda computed: computed[0], set_rows)
    totals = stats.l1, stats.fired
    l1, fired = update(totals, lambda computed: (computed[1].l1, computed[1].fired), add_stats)
    return y, FFNStats(l1, stats.nnz, stats.max_nnz, fired)


def _stats(nnz, l1, fired):
    return FFNStats(jnp.mean(l1), jnp.mean(nnz, dtype=jnp.float32), jnp.max(nnz), fired)


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

"""Norms and linear layers with the dtypes, initial scales and logical axes of a `ModelConfig`."""

from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.custom_batching import sequential_vmap

from pallas_kernels.kernels import TransformerKernels
from pallas_kernels.weights import DTYPES
from twell_jax.config import ModelConfig
from twell_jax.models.sharding import has_shares, on_shares


def logical_axes(*names: str) -> dict[str, Any]:
    """Metadata of a parameter: its logical axes, which `sharding` maps to mesh axes."""
    # Not sharded eagerly, because a model can also be made without a mesh.
    return {"out_sharding": names, "eager_sharding": False}


class RMSNorm(nnx.RMSNorm):
    """`nnx.RMSNorm` over the last axis, by one kernel of XLA.

    XLA fuses x with the sum of its squares only if x is multiplied with the root first, not, as its
    base class does, with the product of root and scale (docs/design/0022-prompts.md).
    """

    def __call__(self, x: jax.Array) -> jax.Array:  # type: ignore[override]  # without a mask
        """`x / sqrt(mean(x^2) + epsilon) * scale` for `x: [..., features]`, in float32."""
        assert self.scale is not None
        return _rms_normed(x, self.scale[...].astype(jnp.float32), self.epsilon).astype(self.dtype)


def _rms_normed(x: jax.Array, scale: jax.Array, eps: float) -> jax.Array:
    x = x.astype(jnp.float32)
    x *= jax.lax.rsqrt(jnp.mean(x * x, axis=-1, keepdims=True) + eps)
    return x * scale


def branch(
    norm: nnx.RMSNorm | nnx.LayerNorm, x: jax.Array, kernels: TransformerKernels | None
) -> tuple[jax.Array, jax.Array]:
    """The norm of `x: [B, T, D]`, and x, to which is added what a layer makes of the norm.

    Args:
      norm: of `norm`.
      x: the residual stream.
      kernels: compute the gradients of both where they can; None: XLA does.
    """
    is_16_bit = x.dtype == norm.dtype and x.dtype in DTYPES
    if kernels is None or not isinstance(norm, RMSNorm) or not (is_16_bit and has_shares(x)):
        return norm(x), x
    assert norm.scale is not None
    return _branch(kernels, norm.epsilon, x, norm.scale[...].astype(jnp.float32))


@partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _branch(
    kernels: TransformerKernels, eps: float, x: jax.Array, scale: jax.Array
) -> tuple[jax.Array, jax.Array]:
    return _rms_normed(x, scale, eps).astype(x.dtype), x


def _branch_with_residuals(
    kernels: TransformerKernels, eps: float, x: jax.Array, scale: jax.Array
) -> tuple[tuple[jax.Array, jax.Array], tuple[jax.Array, jax.Array]]:
    return _branch(kernels, eps, x, scale), (x, scale)


def _branch_gradients(
    kernels: TransformerKernels,
    eps: float,
    kept: tuple[jax.Array, jax.Array],
    gradients: tuple[jax.Array, jax.Array],
) -> tuple[jax.Array, jax.Array]:
    norm_grads = sequential_vmap(partial(kernels.norm_grads, eps=eps))

    def of_share(*operands):
        *streams, scale = operands
        rows = [a.reshape(-1, a.shape[-1]) for a in streams]
        of_x, of_scale = norm_grads(*rows, scale)
        return of_x.reshape(streams[0].shape), of_scale[None]

    x, scale = kept
    of_x, of_scales = on_shares(of_share, x, *gradients, whole=scale)
    return of_x, of_scales.sum(axis=0)


_branch.defvjp(_branch_with_residuals, _branch_gradients)


def norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm | nnx.LayerNorm:
    """The norm before attention, the feed-forward block and the output projection."""
    if config.norm == "rms":
        return _rms_norm(RMSNorm, config, config.d_model, "embed", rngs)
    return nnx.LayerNorm(
        config.d_model,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        use_fast_variance=False,  # which cancels where the mean is large
        scale_metadata=logical_axes("embed"),
        bias_metadata=logical_axes("embed"),
        rngs=rngs,
    )


def longest(norm: nnx.RMSNorm | nnx.LayerNorm) -> jax.Array:
    """A length that no token exceeds after a norm, and so no element of one; float32 []."""
    assert norm.scale is not None
    scale = norm.scale[...].astype(jnp.float32)
    length = scale.size**0.5 * jnp.abs(scale).max()
    if isinstance(norm, nnx.LayerNorm) and norm.bias is not None:
        length += jnp.linalg.norm(norm.bias[...].astype(jnp.float32))
    return jax.lax.stop_gradient(length)


def head_norm(config: ModelConfig, rngs: nnx.Rngs) -> nnx.RMSNorm:
    """The norm of each head's queries or keys."""
    return _rms_norm(nnx.RMSNorm, config, config.head_dim, "heads", rngs)


def _rms_norm(
    kind: type[nnx.RMSNorm], config: ModelConfig, features: int, axis: str, rngs: nnx.Rngs
) -> nnx.RMSNorm:
    return kind(
        features,
        epsilon=config.norm_eps,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        scale_metadata=logical_axes(axis),
        rngs=rngs,
    )


def linear(
    config: ModelConfig,
    shape: tuple[int, int],
    axes: tuple[str, str],
    *,
    use_bias: bool = False,
    kernel_init: nnx.Initializer | None = None,
    rngs: nnx.Rngs,
) -> nnx.Linear:
    """A projection with a kernel of `shape`, (inputs, outputs), and its logical axes."""
    return nnx.Linear(
        *shape,
        use_bias=use_bias,
        dtype=config.dtype,
        param_dtype=config.param_dtype,
        kernel_init=kernel_init or nnx.initializers.normal(config.init_scale),
        kernel_metadata=logical_axes(*axes),
        bias_metadata=logical_axes(axes[1]),
        rngs=rngs,
    )


def residual_init(config: ModelConfig) -> nnx.Initializer:
    """Initial weights of the projections whose outputs are added to the residual stream."""
    # Each block adds twice to the residual stream; this keeps its variance independent of depth.
    return nnx.initializers.normal(config.init_scale / (2 * config.layers) ** 0.5)


def scaled(x: jax.Array, factor: float) -> jax.Array:
    """`x * factor` in the dtype of x."""
    return x if factor == 1 else x * factor

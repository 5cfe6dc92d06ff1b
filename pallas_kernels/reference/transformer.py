"""The meaning of the kernels for what lies around the feed-forward block."""

import jax
import jax.numpy as jnp


def norm_grads(x, of_normed, of_x, scale, *, eps):
    """By JAX's differentiation, in float32."""

    def norm(x, scale):
        return x * jax.lax.rsqrt(jnp.mean(x * x, axis=1, keepdims=True) + eps) * scale

    _, gradients = jax.vjp(norm, x.astype(jnp.float32), scale)
    dx, of_scale = gradients(of_normed.astype(jnp.float32))
    return (of_x + dx).astype(x.dtype), of_scale


def transposed(matrix):
    return matrix.T


def round_both(parts, inverse, dtype, angles=None, rotated=0):
    """What is not finite becomes NaN, as infinity times zero is."""

    def rotated_back(part):
        cos, sin = (jnp.tile(table, (len(part) // len(table), 1))[:, None] for table in angles)
        heads = part.reshape(len(part), -1, 2, cos.shape[-1])
        first, second = heads[:, :, 0], heads[:, :, 1]
        back = first * cos + second * sin, second * cos - first * sin
        return jnp.stack(back, axis=2).reshape(part.shape)

    parts = [part.astype(jnp.float32) for part in parts]
    parts = [rotated_back(part) if i < rotated else part for i, part in enumerate(parts)]
    numbers = jnp.concatenate(parts, axis=1) * inverse
    values = (numbers + 0 * numbers).astype(dtype)
    return values, values.T

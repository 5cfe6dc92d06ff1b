"""The meaning of the dense kernels: a whole block, and the rows that a packed format leaves out."""

import jax.numpy as jnp

from pallas_kernels import quantised
from pallas_kernels.rectifiers import RELU
from pallas_kernels.weights import only_live


def dense_block(x, weights, rectifier=RELU):
    """y, and h with the sign of a zero where its gate is not."""
    dtype = x.dtype
    gate = rectifier.gate(quantised.times(x, weights.activated), dtype).astype(dtype)
    h = gate.astype(jnp.float32)
    if weights.linear is not None:
        h *= rectifier.linear(quantised.times(x, weights.linear))
    h = jnp.where((gate != 0) & (h.astype(dtype) == 0), -0.0, jnp.where(gate != 0, h, jnp.abs(h)))
    h = h.astype(dtype)
    y = jnp.dot(h, weights.down, preferred_element_type=jnp.float32)
    return y.astype(dtype), h


def dense_rows(heavy, weights, rectifier=RELU, keep=0):
    """Computes all M rows of `heavy.x` densely, and uses those on the list."""
    m, dtype = heavy.rows.shape[0], weights.down.dtype
    is_listed = jnp.arange(m) < heavy.count[0]

    def product(w):
        return quantised.times(quantised.for_product(heavy.x, w), w)[:m]

    gate = rectifier.gate(product(weights.activated), dtype).astype(dtype)
    gate = only_live(gate, weights.live)
    h = gate.astype(jnp.float32)
    if weights.linear is not None:
        h = only_live(h * rectifier.linear(product(weights.linear)), weights.live)
    y = jnp.dot(h.astype(dtype), weights.down, preferred_element_type=jnp.float32)
    l1 = jnp.sum(jnp.sum(jnp.abs(h), axis=1), where=is_listed)
    fired = jnp.any((gate != 0) & is_listed[:, None], axis=0)
    if not keep:
        return y.astype(dtype), l1, fired, None
    kept = jnp.stack([h] if weights.linear is None else [gate.astype(jnp.float32), h]).astype(dtype)
    kept = jnp.pad(kept[:, :keep], ((0, 0), (0, max(keep - m, 0)), (0, 0)))
    return y.astype(dtype), l1, fired, kept


def place_rows(count, rows, y_rows, y_ref, residual=None):
    """Sets `y[rows[i]]` to `y_rows[i]`, plus `residual[rows[i]]` if given, for each i < count."""
    m = y_ref.shape[0]
    place = jnp.where(jnp.arange(rows.size) < count[0], rows, m)
    new = y_rows[: rows.size]
    if residual is not None:
        new += residual.at[rows].get(mode="clip")
    y_ref[...] = y_ref[...].at[place].set(new, mode="drop")

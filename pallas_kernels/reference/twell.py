"""The meaning of the kernels for TwELL."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels import quantised
from pallas_kernels.layouts import twell
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.rectifiers import RELU
from pallas_kernels.reference.places import places


def gate_pack(x, w_gate, rectifier=RELU, *, dtype=None):
    """`act(x @ w^T)` in TwELL, entries in ascending order."""
    dtype = x.dtype if dtype is None else dtype
    return twell.pack(rectifier.gate(quantised.times(x, w_gate), dtype).astype(dtype))


def fused_ffn(x, packed, w_up, w_down, rectifier=RELU):
    """Sums over each row's entries, one row at a time; lists heavy rows in ascending order."""
    f32 = jnp.float32
    is_heavy = twell.is_heavy(packed)
    x_up = None if w_up is None else quantised.for_product(x, w_up)

    def row(operands):
        x, tiles, heavy = operands
        counts, words = tiles[:, 0].astype(jnp.int32), tiles[:, 1:]
        rank = jnp.arange(words.shape[1])
        stored = ((rank < counts[:, None]) & ~heavy).ravel()
        n = jnp.where(stored, (words & 0xFFFF).ravel(), 0)
        h = lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), w_down.dtype).ravel()
        h = h.astype(f32)
        if w_up is not None:
            one = jax.tree.map(lambda a: a[None], x)
            (up,) = quantised.times(one, jax.tree.map(lambda a: a[n], w_up))
            h *= rectifier.linear(up)
        h = jnp.where(stored, h, 0)
        y = jnp.sum(jnp.where(stored[:, None], h[:, None] * w_down[n].astype(f32), 0), axis=0)
        l1 = jnp.sum(jnp.abs(h))
        if w_up is not None:
            # That of a token that is not finite is a scale of NaN.
            is_finite = jnp.all(jnp.isfinite(jax.tree.leaves(x)[-1].astype(f32)))
            y, l1 = (jnp.where(heavy | is_finite, a, jnp.nan) for a in (y, l1))
        return y.astype(w_down.dtype), jnp.sum(counts), l1

    rows = places(is_heavy)
    count = jnp.sum(is_heavy, dtype=jnp.int32)
    x_rows = jax.tree.map(lambda a: jnp.pad(a[rows], ((0, -len(a) % 8), (0, 0))), x)
    return *lax.map(row, (x_up, packed, is_heavy)), HeavyRows(count[None], rows, x_rows)

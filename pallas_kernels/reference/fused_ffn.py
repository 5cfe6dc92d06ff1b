"""Meaning of `fused_ffn`."""

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.layouts import twell
from pallas_kernels.layouts.heavy_rows import HeavyRows
from pallas_kernels.layouts.rectifiers import RELU, Rectifier
from pallas_kernels.reference.places import places


def fused_ffn(
    x: jax.Array,
    packed: jax.Array,
    w_up: jax.Array | None,
    w_down: jax.Array,
    rectifier: Rectifier = RELU,
) -> tuple[jax.Array, jax.Array, jax.Array, HeavyRows]:
    """Sums over each row's entries, one row at a time; lists heavy rows in ascending order."""
    f32 = jnp.float32
    is_heavy = twell.is_heavy(packed)

    def row(operands):
        x, tiles, heavy = operands
        counts, words = tiles[:, 0].astype(jnp.int32), tiles[:, 1:]
        rank = jnp.arange(words.shape[1])
        stored = ((rank < counts[:, None]) & ~heavy).ravel()
        n = jnp.where(stored, (words & 0xFFFF).ravel(), 0)
        h = lax.bitcast_convert_type((words >> 16).astype(jnp.uint16), w_down.dtype).ravel()
        h = h.astype(f32)
        if w_up is not None:
            h *= rectifier.linear(jnp.sum(x.astype(f32) * w_up[n].astype(f32), axis=1))
        h = jnp.where(stored, h, 0)
        y = jnp.sum(jnp.where(stored[:, None], h[:, None] * w_down[n].astype(f32), 0), axis=0)
        l1 = jnp.sum(jnp.abs(h))
        if w_up is not None:
            y, l1 = (jnp.where(heavy | jnp.all(jnp.isfinite(x)), a, jnp.nan) for a in (y, l1))
        return y.astype(w_down.dtype), jnp.sum(counts), l1

    rows = places(is_heavy)
    count = jnp.sum(is_heavy, dtype=jnp.int32)
    x_rows = jnp.pad(x[rows], ((0, -len(x) % 8), (0, 0)))
    return *lax.map(row, (x, packed, is_heavy)), HeavyRows(count[None], rows, x_rows)

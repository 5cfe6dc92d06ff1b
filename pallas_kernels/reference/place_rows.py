"""Meaning of `place_rows`."""

import jax
import jax.numpy as jnp


def place_rows(count: jax.Array, rows: jax.Array, y_rows: jax.Array, y_ref: jax.Ref) -> None:
    """Sets `y[rows[i]]` to `y_rows[i]` for each i < count."""
    m = y_ref.shape[0]
    place = jnp.where(jnp.arange(rows.size) < count[0], rows, m)
    y_ref[...] = y_ref[...].at[place].set(y_rows[: rows.size], mode="drop")

"""Meaning of `place_rows`."""

import jax
import jax.numpy as jnp


def place_rows(
    count: jax.Array,
    rows: jax.Array,
    y_rows: jax.Array,
    y_ref: jax.Ref,
    residual: jax.Array | None = None,
) -> None:
    """Sets `y[rows[i]]` to `y_rows[i]`, plus `residual[rows[i]]` if given, for each i < count."""
    m = y_ref.shape[0]
    place = jnp.where(jnp.arange(rows.size) < count[0], rows, m)
    new = y_rows[: rows.size]
    if residual is not None:
        new += residual.at[rows].get(mode="clip")
    y_ref[...] = y_ref[...].at[place].set(new, mode="drop")

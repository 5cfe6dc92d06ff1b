"""Operands of the kernels of the gate."""

import jax
import jax.numpy as jnp
import numpy as np

from tests import seeds


def draw(m, d, h, density, dtype, least=-448) -> tuple[jax.Array, jax.Array]:
    """x and w_gate whose relu(x @ w_gate^T) has about `density` non-zeros.

    Small integers: every order of summation gives the same float32, so results agree to the bit.
    The last column of x is 1, that of w_gate minus a threshold, which is at least `least`.
    """
    rng = seeds.rng()
    x, w = (rng.integers(-2, 3, shape).astype(np.float32) for shape in ((m, d), (h, d)))
    x[:, -1], w[:, -1] = 1, 0
    w[:, -1] = -np.clip(np.quantile(x @ w.T, 1 - density), least, 448)
    return jnp.asarray(x, dtype), jnp.asarray(w, dtype)


def with_odd_values(x, w, infinite_row):
    """Rows of x with NaN, infinities, -0.0, and a subnormal number, by which w makes odd gates."""
    tiny = float(jnp.finfo(x.dtype).smallest_subnormal)
    x = x.at[3].set(jnp.nan).at[5, 7].set(jnp.inf).at[infinite_row, 9].set(-jnp.inf)
    x = x.at[68].set(-0.0).at[10].set(0).at[10, 0].set(tiny)
    return x, w.at[4, 0].set(1).at[200:204, 0].set(-0.25)

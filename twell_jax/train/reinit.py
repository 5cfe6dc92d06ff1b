"""Re-initialises dead neurons during training (arXiv 2603.23198)."""

from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from twell_jax.train.optimizer import trained


def reinitialise(
    params: nnx.State,
    opt_state: optax.OptState,
    dead: jax.Array,
    *,
    key: jax.Array,
    scale: float,
    optimizer: optax.GradientTransformation,
) -> tuple[nnx.State, optax.OptState]:
    """Draws the gate weights of dead neurons anew and resets their moments in the optimizer.

    Args:
      params: the parameters of a `Transformer`.
      opt_state: the optimizer's state for these parameters.
      dead: bool `[layers, d_ff]`, whether a neuron is dead.
      key: a `jax.random.key`.
      scale: standard deviation of the new weights (`model.init_scale`).
      optimizer: the optimizer that `opt_state` belongs to.

    Returns:
      `params` and `opt_state`. The rows of dead neurons in `w_gate` (in `w_up` without a gate) are
      drawn from N(0, scale^2), and their moments are 0. Everything else is unchanged.
    """
    gate = "w_gate" if "w_gate" in params["blocks"]["mlp"] else "w_up"

    def rows_of(path: tuple[Any, ...], _: jax.Array) -> jax.Array | bool:
        name = jax.tree_util.keystr(path, simple=True, separator="/")
        return dead[..., None] if name.startswith(f"blocks/mlp/{gate}/") else False

    def draw(weights: jax.Array, rows: jax.Array | bool) -> jax.Array:
        if rows is False:
            return weights
        return jnp.where(
            rows, scale * jax.random.normal(key, weights.shape, weights.dtype), weights
        )

    def forget(moment: jax.Array, rows: jax.Array | bool) -> jax.Array:
        return moment if rows is False else jnp.where(rows, 0, moment)

    rows = jax.tree_util.tree_map_with_path(rows_of, trained(params))
    return (
        nnx.merge_state(params, jax.tree.map(draw, trained(params), rows)),
        optax.tree_utils.tree_map_params(optimizer, forget, opt_state, rows),
    )

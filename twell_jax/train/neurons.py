"""Neurons in training: dead ones are drawn anew, all can be sorted, and idle ones are skipped.

Three parts of the recipe change or leave out single neurons:

- `reinitialise` draws the gates of dead neurons anew (arXiv 2603.23198).
- `reorder` puts neurons in another order, with all that training keeps for them.
- Skipping leaves out, between two steps at full width, the neurons that were not active up to the
  first.

A step at full width (`is_full_width`) finds which neurons are active. After it these come first in
each layer (`live_first`), together with those that were active in the steps before, back to as many
as there are between two such steps. The steps that follow take the others as never active (`live`
of `sparse_ffn`), so that kernels skip them. The next step at full width counts those that are
active there nonetheless: they were missed.

What is skipped gets gradients of zero, and the optimizer treats it as it treats any such gradient:
moments decay, weights move by what is left of them and by weight decay. A neuron that truly is not
active has the same gradients at full width, so missed ones are all that is approximated.

Sorting changes the order in which sums over neurons are made, so last bits.
"""

from collections.abc import Container
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import nnx

from twell_jax.config import Config
from twell_jax.ffn import BY_NEURON, LiveWidth, partition
from twell_jax.ffn.stats import UNION_NEURONS
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
    is_gate = _of_blocks(params, {gate})
    rows = dead[..., None]

    def draw(weights: jax.Array, is_gate: bool) -> jax.Array:
        if not is_gate:
            return weights
        drawn = scale * jax.random.normal(key, weights.shape, weights.dtype)
        return jnp.where(rows, drawn, weights)

    def forget(moment: jax.Array, is_gate: bool) -> jax.Array:
        return jnp.where(rows, 0, moment) if is_gate else moment

    return (
        nnx.merge_state(params, jax.tree.map(draw, trained(params), is_gate)),
        optax.tree_utils.tree_map_params(optimizer, forget, opt_state, is_gate),
    )


def reorder(params: nnx.State, order: jax.Array) -> nnx.State:
    """Puts the neurons of each layer in another order, with all that belongs to them.

    The model computes the same, up to the order of sums. Layer follows layer, each in place if the
    operands are donated, so that the memory of one layer's matrix is needed besides. Rows of
    neurons may be split over devices (fsdp), but not the neurons.

    Args:
      params: the parameters of a `Transformer`.
      order: int32 [layers, d_ff], the former index of each neuron.

    Raises:
      ValueError: neurons are split over a mesh axis named "tensor".
    """
    _require_whole_layers()
    by_neuron = _of_blocks(params, BY_NEURON)
    rows = jax.tree.map(partial(_reordered, order), trained(params), by_neuron)
    return nnx.merge_state(params, rows)


def reorder_moments(
    opt_state: optax.OptState,
    params: nnx.State,
    order: jax.Array,
    optimizer: optax.GradientTransformation,
) -> optax.OptState:
    """The state of `optimizer` for `params` once their neurons are in another order.

    Raises:
      ValueError: as `reorder`.
    """
    _require_whole_layers()
    by_neuron = _of_blocks(params, BY_NEURON)
    return optax.tree_utils.tree_map_params(
        optimizer, partial(_reordered, order), opt_state, by_neuron
    )


def _of_blocks(params: nnx.State, names: Container[str]) -> Any:
    """For each parameter that is trained, whether it is one of these of the feed-forward blocks."""

    def is_one(path: tuple[Any, ...], _: jax.Array) -> bool:
        keys = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return keys[:2] == ["blocks", "mlp"] and keys[2] in names

    return jax.tree_util.tree_map_with_path(is_one, trained(params))


def _reordered(order: jax.Array, rows: jax.Array, by_neuron: bool) -> jax.Array:
    """A parameter `[layers, ...]` or a moment of it; unchanged if its rows are not neurons."""

    def of_layer(layer: jax.Array, rows: jax.Array) -> jax.Array:
        return rows.at[layer].set(rows[layer][order[layer]])

    return jax.lax.fori_loop(0, len(order), of_layer, rows) if by_neuron else rows


def _require_whole_layers() -> None:
    if partition.devices().neurons > 1:
        raise ValueError(
            f"neurons are split over the mesh axis {partition.TENSOR!r}: sorting would give the "
            "first devices all that are active; sort them on a mesh without this axis"
        )


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class Skipping:
    """The part of the training state that says which neurons are skipped.

    Attributes:
      live: int32 [layers], steps that are not at full width compute the neurons up to this one.
      missed: int32 [layers], number of neurons that were active in the last step at full width
        although the steps before it had skipped them.
    """

    live: jax.Array
    missed: jax.Array


def first_skipping(config: Config) -> Skipping | None:
    """Before the first step, which is at full width; None without `skip_dead_every`."""
    if not config.skip_dead_every:
        return None
    layers, d_ff = config.model.layers, config.model.d_ff
    return Skipping(jnp.full(layers, d_ff, jnp.int32), jnp.zeros(layers, jnp.int32))


def is_full_width[T: (int, jax.Array)](config: Config, step: T) -> T | bool:
    """Whether a step computes all neurons: every `skip_dead_every` steps, and with new gates.

    Args:
      config: a run with `skip_dead_every`.
      step: number of steps taken before it.
    """
    full = step % config.skip_dead_every == 0
    if config.reinit_every:
        full = full | (step % config.reinit_every == 0)
    return full


def live_in(skipping: Skipping, step: jax.Array, config: Config) -> jax.Array:
    """int32 [layers], number of neurons that a step computes, after `step` others."""
    return jnp.where(is_full_width(config, step), config.model.d_ff, skipping.live)


def with_live(params: nnx.State, live: jax.Array) -> nnx.State:
    """The parameters of a model whose `live_width` is false as those of one where it is true."""
    mlp = nnx.State({"live": LiveWidth(live)})
    return nnx.merge_state(params, nnx.State({"blocks": nnx.State({"mlp": mlp})}))


def counted(
    skipping: Skipping, active: jax.Array, idle_steps: jax.Array, step: jax.Array, config: Config
) -> Skipping:
    """After a step: how many neurons the steps before missed, if it is one at full width.

    Args:
      skipping: before it.
      active: bool [layers, d_ff], which neurons were active in it.
      idle_steps: int32 [layers, d_ff], before it.
      step: int32 [], number of steps taken before it.
      config: a run with `skip_dead_every`.
    """
    was_skipped = jnp.arange(active.shape[1]) >= skipping.live[:, None]
    was_skipped &= jnp.logical_not(is_full_width(config, step - 1))
    # All that are skipped have been idle; those whose gates were just drawn anew count from 0.
    missed = jnp.sum(active & was_skipped & (idle_steps > 0), axis=1, dtype=jnp.int32)
    missed = jnp.where(is_full_width(config, step), missed, skipping.missed)
    return Skipping(skipping.live, missed)


def live_first(active: jax.Array) -> tuple[jax.Array, jax.Array]:
    """An order of neurons in which those that were active come first, and how many are computed.

    Args:
      active: bool [layers, d_ff], which neurons have been active lately.

    Returns:
      int32 [layers, d_ff], the former index of each neuron; active ones keep their order, and so do
        the others. int32 [layers], the number of active ones, rounded up to chunks of 128, as
        kernels compute whole chunks anyway.
    """
    order = jnp.argsort(~active, axis=1, stable=True).astype(jnp.int32)
    chunks = -(-jnp.sum(active, axis=1, dtype=jnp.int32) // UNION_NEURONS)
    return order, jnp.minimum(UNION_NEURONS * chunks, active.shape[1])

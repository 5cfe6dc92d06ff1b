"""Puts the neurons of a model's layers in another order, with all that training keeps for them."""

from collections.abc import Callable
from typing import Any

import jax
import optax
from flax import nnx

from twell_jax.ffn import BY_NEURON, partition
from twell_jax.train.optimizer import trained


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
    rows = jax.tree.map(_reordered(order), trained(params), _are_by_neuron(params))
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
    by_neuron = _are_by_neuron(params)
    return optax.tree_utils.tree_map_params(optimizer, _reordered(order), opt_state, by_neuron)


def _are_by_neuron(params: nnx.State) -> Any:
    """For each parameter that is trained, whether its rows, of each layer, are neurons."""

    def is_by_neuron(path: tuple[Any, ...], _: jax.Array) -> bool:
        names = jax.tree_util.keystr(path, simple=True, separator="/").split("/")
        return names[:2] == ["blocks", "mlp"] and names[2] in BY_NEURON

    return jax.tree_util.tree_map_with_path(is_by_neuron, trained(params))


def _reordered(order: jax.Array) -> Callable[[jax.Array, bool], jax.Array]:
    if partition.devices().neurons > 1:
        raise ValueError(
            f"neurons are split over the mesh axis {partition.TENSOR!r}: sorting would give the "
            "first devices all that fire; sort them on a mesh without this axis"
        )

    def of_layer(layer: jax.Array, rows: jax.Array) -> jax.Array:
        return rows.at[layer].set(rows[layer][order[layer]])

    def of_all(rows: jax.Array, by_neuron: bool) -> jax.Array:
        return jax.lax.fori_loop(0, len(order), of_layer, rows) if by_neuron else rows

    return of_all

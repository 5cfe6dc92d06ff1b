"""Neurons in the order of their use, with which sparse gradients take less time."""

from __future__ import annotations  # the documentation is built without torch

import jax
import jax.numpy as jnp
import numpy as np
import torch

from twell_jax import ffn
from twell_jax.torch.module import collect_stats


def order_by_use(model: torch.nn.Module, optimizer: torch.optim.Optimizer | None = None) -> None:
    """Puts the neurons of each block in the order of `twell_jax.order_by_use`, in place.

    Call it between two steps of training: the statistics of the last one say how often neurons are
    active. The blocks then compute the same, but for rounding; files of the model have its neurons
    in the new order.

    Args:
      model: one with `SparseMLP`s.
      optimizer: the one that trains it, if it has begun: what it keeps for each weight moves, too.

    Raises:
      ValueError: as `collect_stats`; or kernels have not computed a block, as where most neurons
        are active, and only they measure that; or two blocks have the same weight.
    """
    found = collect_stats(model)
    layers = {name: _layers(model.get_submodule(name)) for name in found}
    weights = [layer.weight for of_block in layers.values() for layer, _ in of_block]
    if len({id(weight) for weight in weights}) < len(weights):
        raise ValueError("two blocks have the same weight, whose neurons cannot follow both")
    for name, stats in found.items():
        if (stats.tiles < 0).any():
            raise ValueError(
                f"{name or 'the block'}: torch computed it, and did not measure how often neurons "
                "are active; set its implementation to 'mosaic'"
            )
    for name, stats in found.items():
        order = _order(stats.tiles, stats.nnz)
        for layer, axis in layers[name]:
            _reorder(layer.weight, axis, order, optimizer)


def _layers(block: torch.nn.Module) -> list[tuple[torch.nn.Module, int]]:
    """The layers of a block, and the axis of each weight that its neurons lie along."""
    inner = [layer for layer in (block.gate_proj, block.up_proj) if layer is not None]
    return [*((layer, 0) for layer in inner), (block.down_proj, 1)]


def _order(tiles: torch.Tensor, nnz: torch.Tensor) -> torch.Tensor:
    with jax.default_device(jax.devices("cpu")[0]):
        order = ffn.order_by_use(jnp.asarray(tiles.cpu().numpy()), jnp.float32(nnz.item()))
    return torch.from_numpy(np.array(order, np.int64))


def _reorder(
    weight: torch.Tensor,
    axis: int,
    order: torch.Tensor,
    optimizer: torch.optim.Optimizer | None,
) -> None:
    """Moves the rows or columns of a weight, of its gradient and of what is kept for it."""
    kept = optimizer.state.get(weight, {}).values() if optimizer is not None else ()
    moved = [a for a in kept if isinstance(a, torch.Tensor) and a.shape == weight.shape]
    for a in (weight.data, weight.grad, *moved):
        if a is not None:
            a.copy_(a.index_select(axis, order.to(a.device)))

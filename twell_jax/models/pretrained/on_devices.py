"""Parameters, made on devices of tensors as they lie in files.

Devices turn the tensors and stack those of layers, a few layers at a time. The host would take
longer, and touch as much memory as the model has.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from twell_jax.models.pretrained.files import Tensor

_UNDER_WAY = 4  # layers, at most, on their way from files to devices


class Recipe(NamedTuple):
    """How a parameter is made.

    Attributes:
      name: what the tensors are called that it is made of.
      shape, dtype: its own.
      stacked: whether it has a leading axis of layers, each made of a tensor.
      transposed: whether the tensors are the transposes of it, or of its layers.
      offset: what is added to the tensors.
      placement: where it is to lie; None: on JAX's default device, bound to none.
    """

    name: str
    shape: tuple[int, ...]
    dtype: np.dtype
    stacked: bool
    transposed: bool
    offset: float
    placement: NamedSharding | None

    def on_devices(self, tensor: Tensor) -> jax.Array:
        """A tensor, of which each device gets the part that it needs, as it lies in its file."""
        if self.placement is None:
            return jax.device_put(tensor[...])
        spec = self.placement.spec
        axes = [*spec, *(len(self.shape) - len(spec)) * [None]][self.stacked :]
        own = NamedSharding(self.placement.mesh, P(*(axes[::-1] if self.transposed else axes)))
        return jax.make_array_from_callback(tensor.shape, own, tensor.__getitem__)

    def turned(self, tensor: jax.Array) -> jax.Array:
        """The parameter, or a layer of it."""
        tensor = (tensor.T if self.transposed else tensor).astype(self.dtype)
        return tensor + jnp.asarray(self.offset, self.dtype) if self.offset else tensor

    def placed(self, parameter: jax.Array) -> jax.Array:
        """The parameter where it is to lie."""
        if self.placement is None:
            return parameter
        return lax.with_sharding_constraint(parameter, self.placement)


type _Recipes = tuple[Recipe, ...]
type _Arrays = dict[str, jax.Array]


def read(
    recipes: Sequence[Recipe],
    sources: Mapping[str, Sequence[Tensor]],
    mesh: jax.sharding.Mesh | None,
) -> _Arrays:
    """The parameters by name.

    Args:
      recipes: at least one is of layers, and all of these have as many.
      sources: the tensors by the names of the recipes: one, or those of the layers.
      mesh: that of the placements; None if there are none.
    """
    stacked = tuple(recipe for recipe in recipes if recipe.stacked)
    # A mesh that is set around the call would decide about arrays that are bound to no device.
    with jax.set_mesh(jax.sharding.Mesh(np.empty((), object), ()) if mesh is None else mesh):
        found: _Arrays = {}
        for recipe in recipes:
            if not recipe.stacked:
                (source,) = sources[recipe.name]
                found[recipe.name] = _alone(recipe, recipe.on_devices(source))
                found[recipe.name].block_until_ready()  # what came of the file then leaves
        layers = _zeros(stacked)
        for number in range(stacked[0].shape[0]):
            tensors = {of.name: of.on_devices(sources[of.name][number]) for of in stacked}
            layers = _with_layer(stacked, layers, tensors, jax.device_put(np.int32(number)))
            if number % _UNDER_WAY == 0:
                jax.block_until_ready(layers)
    return found | layers


# Jitted once, for all models of these shapes.


@partial(jax.jit, static_argnums=0)
def _alone(recipe: Recipe, tensor: jax.Array) -> jax.Array:
    return recipe.placed(recipe.turned(tensor))


@partial(jax.jit, static_argnums=0)
def _zeros(recipes: _Recipes) -> _Arrays:
    return {of.name: of.placed(jnp.zeros(of.shape, of.dtype)) for of in recipes}


@partial(jax.jit, static_argnums=0, donate_argnums=1)
def _with_layer(recipes: _Recipes, layers: _Arrays, tensors: _Arrays, number: jax.Array) -> _Arrays:
    def of(recipe: Recipe) -> jax.Array:
        added = recipe.turned(tensors[recipe.name])
        return lax.dynamic_update_index_in_dim(layers[recipe.name], added, number, 0)

    return {recipe.name: recipe.placed(of(recipe)) for recipe in recipes}

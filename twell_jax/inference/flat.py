"""A model as a list of its parameters, which a call flattens sooner, and the rest of it."""

from dataclasses import dataclass

import jax
from flax import nnx

from twell_jax.models import Transformer


@dataclass(frozen=True)
class Structure:
    """What a model is without its parameters; it can be a key of a cache.

    Attributes:
      graph: of the model.
      tree: of its parameters.
    """

    graph: nnx.GraphDef
    tree: jax.tree_util.PyTreeDef

    def merged(self, params: list[jax.Array]) -> Transformer:
        """The model with these parameters."""
        return nnx.merge(self.graph, jax.tree.unflatten(self.tree, params))


def flattened(model: Transformer) -> tuple[list[jax.Array], Structure]:
    """The parameters of a model, and the rest."""
    graph, params = nnx.split(model)
    leaves, tree = jax.tree.flatten(params)
    return leaves, Structure(graph, tree)

"""Collects the statistics of all `SparseMLP`s of a model, for its loss."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx

from twell_jax.ffn.stats import FFNStats


class SownStats(nnx.Intermediate):
    """The variable type into which a `SparseMLP` sows the `FFNStats` of each of its calls."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class ModelStats:
    """What the sparse blocks of a model did in one call of it.

    Attributes:
      modules: the `FFNStats` of each `SparseMLP` by its path in the model, such as "layers/0/mlp".
        If a block is called several times, the later calls are at "layers/0/mlp#1" and so on.
    """

    modules: dict[str, FFNStats]

    @property
    def l1(self) -> jax.Array:
        """float32 [], the mean of `FFNStats.l1` over the blocks; add it to the loss, times a
        coefficient (arXiv 2603.23198, recipe). A block that is a stack of layers counts as many
        times as it has layers."""
        return self._mean("l1")

    @property
    def nnz(self) -> jax.Array:
        """float32 [], the mean of `FFNStats.nnz` over the blocks."""
        return self._mean("nnz")

    def _mean(self, name: str) -> jax.Array:
        every = [jnp.ravel(getattr(stats, name)) for stats in self.modules.values()]
        return jnp.mean(jnp.concatenate(every))


def capture_stats(model: Callable[..., Any]) -> Callable[..., tuple[Any, ModelStats]]:
    """Wraps a model so that it returns the statistics of its sparse blocks with its output.

    Args:
      model: an `nnx.Module`, one of its methods, or a function whose first argument is one.

    Returns:
      A function of the same arguments that returns (output, `ModelStats`). It raises `ValueError`
      if the model called no `SparseMLP`.

    Example:
      >>> model = nnx.Sequential(SparseMLP(8, 32, rngs=nnx.Rngs(0)), nnx.relu)
      >>> y, stats = capture_stats(model)(jnp.ones((4, 8)))
      >>> list(stats.modules)
      ['layers/0']
    """
    captured = nnx.capture(model, SownStats)

    def call(*args: Any, **kwargs: Any) -> tuple[Any, ModelStats]:
        output, sown = captured(*args, **kwargs)
        modules = {}
        for path, variable in nnx.to_flat_state(sown):
            *place, _ = path
            name = "/".join(map(str, place))
            for i, stats in enumerate(variable.get_value()):
                modules[f"{name}#{i}" if i else name] = stats
        return output, _checked(modules)

    return call


def collect_stats(collection: Mapping[str, Any]) -> ModelStats:
    """The statistics of the blocks of a Linen model.

    Args:
      collection: "SownStats" of the variables that `model.apply(..., mutable=["SownStats"])`
        returns if blocks are made by `nnx.bridge.to_linen(SparseMLP, ..., keep_stats=True)`.

    Returns:
      `ModelStats`. A block that is called several times counts once, with its last call.

    Raises:
      ValueError: the collection holds no statistics.
    """
    found = jax.tree.leaves_with_path(collection, is_leaf=lambda leaf: isinstance(leaf, FFNStats))
    modules = {}
    for (*place, _), stats in found:
        modules["/".join(key.key for key in place)] = stats
    return _checked(modules)


def _checked(modules: dict[str, FFNStats]) -> ModelStats:
    if not modules:
        raise ValueError("the model called no SparseMLP, so there are no statistics to return")
    return ModelStats(modules)

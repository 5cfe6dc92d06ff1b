"""Collects the statistics of all `SparseMLP`s of a model, for its loss."""

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx

from twell_jax.ffn.stats import NOT_MEASURED, FFNStats


class SownStats(nnx.Intermediate):
    """The variable type into which a `SparseMLP` sows the `FFNStats` of each of its calls."""


@jax.tree_util.register_dataclass
@dataclass(frozen=True, repr=False)
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

    @property
    def union(self) -> jax.Array:
        """float32 [], the mean of `FFNStats.union`, U, over the blocks; -1 if a block did not
        measure it."""
        return self._mean_if_measured("union")

    @property
    def listed(self) -> jax.Array:
        """float32 [], the mean of `FFNStats.listed` over the blocks; -1 as with `union`."""
        return self._mean_if_measured("listed")

    @property
    def overflow(self) -> jax.Array:
        """float32 [], the share of the blocks whose sparse gradients overflowed, from 0 to 1."""
        return self._mean("overflow")

    def table(self) -> str:
        """A line of statistics for each block, and one for all, as text to print.

        A stack of layers has a line for each of them. What a block did not measure is "-".

        Raises:
          TypeError: the statistics have no values yet, inside `jax.jit` or `jax.grad`.
        """
        if not self._has_values:
            raise TypeError(
                "table() needs values, and inside jax.jit or jax.grad there are none yet; return "
                "the ModelStats and print its table outside"
            )
        heading = ("block", "nnz", "max nnz", "zeros", "U", "listed", "overflow")
        rows = [heading, *self._rows(), ("all", *self._of_all())]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        return "\n".join(
            "  ".join(
                cell.rjust(width) if i else cell.ljust(width)
                for i, (cell, width) in enumerate(zip(row, widths, strict=True))
            )
            for row in rows
        )

    def __repr__(self) -> str:
        blocks = sum(np.size(stats.l1) for stats in self.modules.values())
        if not self._has_values:
            return f"ModelStats({blocks} blocks, without values inside a transformation of JAX)"
        nnz, _, zeros, union, listed, overflow = self._of_all()
        return (
            f"ModelStats({blocks} blocks: nnz {nnz}, zeros {zeros}, U {union}, listed {listed}, "
            f"overflow {overflow}, L1 {self.l1:.4g})"
        )

    @property
    def _has_values(self) -> bool:
        leaves = jax.tree.leaves(self.modules)
        arrays = all(isinstance(leaf, np.ndarray | jax.Array) for leaf in leaves)
        return arrays and not any(isinstance(leaf, jax.core.Tracer) for leaf in leaves)

    def _rows(self) -> Iterator[tuple[str, ...]]:
        for name, stats in self.modules.items():
            host = jax.tree.map(np.asarray, stats)
            for place in np.ndindex(host.nnz.shape):
                one = jax.tree.map(lambda a, place=place: a[place], host)
                at = "".join(f"[{i}]" for i in place)
                yield f"{name}{at}", *_cells(one, one.max_nnz, 1 - one.nnz / one.fired.size)

    def _of_all(self) -> tuple[str, ...]:
        every = [*self.modules.values()]
        most = max(int(np.max(stats.max_nnz)) for stats in every)
        zeros = [np.ravel(1 - stats.nnz / stats.fired.shape[-1]) for stats in every]
        return _cells(self, most, np.concatenate(zeros).mean())

    def _mean_if_measured(self, name: str) -> jax.Array:
        every = self._every(name)
        return jnp.where(jnp.any(every < 0), NOT_MEASURED, jnp.mean(every))

    def _mean(self, name: str) -> jax.Array:
        return jnp.mean(self._every(name))

    def _every(self, name: str) -> jax.Array:
        every = [jnp.ravel(getattr(stats, name)) for stats in self.modules.values()]
        return jnp.concatenate(every)


def _cells(of: Any, most: Any, zeros: Any) -> tuple[str, ...]:
    """What a row of the table shows of a block or of a whole model."""
    shares = ("-" if share < 0 else f"{share:.1%}" for share in (of.union, of.listed))
    return f"{of.nnz:.1f}", str(most), f"{zeros:.1%}", *shares, f"{of.overflow:.0%}"


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
    of_module = ((place, a) for (*place, _), a in found if isinstance(a, FFNStats))
    return _checked({"/".join(key.key for key in place): stats for place, stats in of_module})


def _checked(modules: dict[str, FFNStats]) -> ModelStats:
    if not modules:
        raise ValueError("the model called no SparseMLP, so there are no statistics to return")
    return ModelStats(modules)

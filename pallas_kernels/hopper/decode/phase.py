"""What the clusters of a launch do: a kernel for few tokens, alone or together with others."""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax


class Phase[R](NamedTuple):
    """What some clusters of a launch do.

    Attributes:
      name: the kernel's.
      clusters: their number.
      cluster: the quartets of a cluster, and the blocks of each: four if there are several.
      operands: a pytree of arrays. The very object that is one of the `outs` of a phase before
        stands for what that phase writes.
      refs: a pytree of references.
      outs: what it writes.
      form: makes the kernel's result of these.
      memory: the shared memory of a block, a pytree.
      barriers: those of a block, likewise.
      run: what a block does, called with the number of its cluster in the phase, a function that
        waits for the kernel or the phase before, and what `operands`, `refs`, `outs`, `memory` and
        `barriers` are inside the kernel. Afterwards the memory may be that of another phase.
      cost: floating-point operations, and what is read or written; None if they are not known.
      options: of `plgpu.CompilerParams`, which all phases of a launch get.
    """

    name: str
    clusters: int
    cluster: tuple[int, int]
    operands: Any
    refs: Any
    outs: Sequence[jax.ShapeDtypeStruct]
    form: Callable[..., R]
    memory: Any
    barriers: Any
    run: Callable[..., None]
    cost: tuple[int, Sequence[Any]] | None = None
    options: Mapping[str, Any] = MappingProxyType({})

    def in_clusters(self, cluster: tuple[int, int]) -> "Phase[R]":
        """With the same blocks in clusters of this shape, each so many of those that it has.

        Raises:
          ValueError: the blocks do not fill such clusters.
        """
        of_one, blocks = math.prod(cluster), self.clusters * math.prod(self.cluster)
        if blocks % of_one:
            raise ValueError(f"{self.name} has {blocks} blocks, which fill no clusters of {of_one}")
        return self._replace(clusters=blocks // of_one, cluster=cluster)


def only[T](result: T) -> T:
    """The `form` of a single array."""
    return result

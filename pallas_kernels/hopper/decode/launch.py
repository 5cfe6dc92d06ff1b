"""Launches a kernel for few tokens, or two of them together.

A launch costs the host 4 to 9 us, more than the GPU takes for some of these kernels. Kernels that
are launched together are phases of one grid: the clusters of the second stand behind those of the
first, and wait until all its thread blocks ("blocks" below) have arrived. If there is no room for
all of them at once, the last clusters of the first phase are the first of the second, too.

This rests on two things that GPUs do though CUDA does not promise them. Clusters start in their
order, so those that are waited for are on the GPU before those that wait. And what a first phase
has written can be read at once by a kernel that starts when all clusters behind those of the first
phase, at least one, have waited for it (`token_ffn`).
"""

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.common import params, versions
from pallas_kernels.hopper.common.dependent_launch import await_previous
from pallas_kernels.hopper.decode import grid
from pallas_kernels.hopper.decode.token_ring import clusters_at_once, fitting


class Phase[R](NamedTuple):
    """What some clusters of a launch do.

    Attributes:
      name: the kernel's.
      clusters: their number.
      cluster: the subclusters of a cluster, and the thread blocks of each: four if there are
        several.
      operands: a pytree of arrays. The very object that is one of the `outs` of a phase before
        stands for what that phase writes.
      refs: a pytree of references.
      outs: what it writes.
      form: makes the kernel's result of these.
      memory: the shared memory of a thread block, a pytree.
      barriers: those of a block, likewise.
      run: what each block does, called with the number of its cluster in the phase, a function that
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


def launched[**P, R](phase: Callable[P, Phase[R]]) -> Callable[P, R]:
    """The kernel KERNEL of `KERNEL_phase`, which makes its phase; its docstring is the kernel's."""

    @functools.wraps(phase)
    def kernel(*args: P.args, **options: P.kwargs) -> R:
        (result,) = launch(phase(*args, **options))
        return result

    kernel.__name__ = kernel.__qualname__ = phase.__name__.removesuffix("_phase")
    return kernel


class Arrivals(NamedTuple):
    """Where thread blocks of a first phase count themselves: `counts[layer, 0, column]`, now zero.

    Attributes:
      counts: as in `hopper.decode.active_counts`.
      layer: int32 `[1]`.
      column: of the first row, an integer.
    """

    counts: jax.Ref
    layer: jax.Array
    column: int


def launch(*phases: Phase, arrivals: Arrivals | None = None) -> list[Any]:
    """The result of each phase.

    Args:
      phases: one or two, with the same `cluster`.
      arrivals: of two.
    """
    (cluster,) = {phase.cluster for phase in phases}
    outs = [out for phase in phases for out in phase.outs]
    counts, layer, column = arrivals or (None, None, None)
    arrays, read = _distinct(([phase.operands for phase in phases], layer), outs)
    refs, changed = _distinct(([phase.refs for phase in phases], counts))
    memory = [phase.memory for phase in phases]
    options = {name: value for phase in phases for name, value in phase.options.items()}
    kernel = plgpu.kernel(
        functools.partial(_kernel, phases=phases, read=read, changed=changed, column=column),
        out_type=outs,
        scratch_types=dict(
            memory=memory if len(memory) == 1 else plgpu.RefUnion(*memory),
            barriers=[phase.barriers for phase in phases],
        ),
        grid=(clusters_of(*phases),),
        grid_names=("cluster",),
        cluster=cluster,
        cluster_names=("subcluster", "part"),
        kernel_name="_and_".join(phase.name for phase in phases),
        **_cost(phases),
        compiler_params=dataclasses.replace(params.UNORDERED, **options),
    )
    written = iter(in_place.barrier(kernel(in_place.barrier(arrays), refs)))
    return [phase.form(*itertools.islice(written, len(phase.outs))) for phase in phases]


def _distinct(tree, known=()):
    """The leaves of a tree that are not in `known`, each once, and what makes the tree again.

    What makes it is called with what the leaves and `known` have become.
    """
    leaves, structure = jax.tree.flatten(tree)
    found = {id(leaf): leaf for leaf in (*known, *leaves)}
    place_of = {key: place for place, key in enumerate(found)}

    def restore(new, known=()):
        together = [*known, *new]
        return structure.unflatten(together[place_of[id(leaf)]] for leaf in leaves)

    return list(found.values())[len(known) :], restore


def _kernel(arrays, refs, *outs, memory, barriers, phases, read, changed, column):
    (operands, layer), (refs, counts) = read(arrays, outs), changed(refs)
    number, own = lax.axis_index("cluster"), iter(outs)
    outs = [list(itertools.islice(own, len(phase.outs))) for phase in phases]

    def run(place, number, wait):
        parts = (part[place] for part in (operands, refs, outs, memory, barriers))
        phases[place].run(number, wait, *parts)

    first, *more = phases
    if not more:
        run(0, number, await_previous)
        return
    (second,) = more
    arrived = counts.at[layer[0], 0, column]
    blocks = math.prod(first.cluster) * first.clusters
    start = lax.axis_size("cluster") - second.clusters

    @pl.when(number < first.clusters)
    def _():
        run(0, number, await_previous)
        grid.arrive(arrived)

    @pl.when(number >= start)
    def _():
        run(1, number - start, functools.partial(_wait_for_phase, arrived, blocks))


def clusters_of(*phases: Phase) -> int:
    """The number of clusters of a launch: of two phases so many as fit on the GPU at once.

    But no cluster has two of the same phase, and at least one is behind those of the first.
    """
    together = sum(phase.clusters for phase in phases)
    if len(phases) == 1:
        return together
    first, second = phases
    on_sm = min(fitting(phase.memory) for phase in phases)
    at_once = clusters_at_once(on_sm, math.prod(first.cluster))
    return min(together, max(at_once, first.clusters + 1, second.clusters))


def _wait_for_phase(arrived, blocks):
    await_previous()  # `arrived` may have been set to zero just before
    grid.wait(arrived, blocks)


def _cost(phases):
    costs = [phase.cost for phase in phases]
    if None in costs:  # a part of the cost would mislead
        return {}
    arrays = [array for _, arrays in costs for array in arrays]
    return versions.cost(sum(flops for flops, _ in costs), arrays)

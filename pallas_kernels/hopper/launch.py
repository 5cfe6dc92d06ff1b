"""Launches a kernel for few tokens, or several of them together.

A launch costs the host 4 to 9 us, more than the GPU takes for some of these kernels. Kernels that
are launched together are phases of one grid: the clusters of each stand behind those of the phase
before, and wait until all its blocks have arrived. This rests on two things that GPUs do though
CUDA does not promise them. Clusters start in their order, so those that are waited for are on the
GPU before those that wait. And what a first phase has written can be read at once by a kernel that
starts when all blocks of the second phase have waited for it (`token_ffn`).
"""

import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.device import grid, versions
from pallas_kernels.hopper.frames.phase import Phase


def launched[**P, R](phase: Callable[P, Phase[R]]) -> Callable[P, R]:
    """The kernel KERNEL of `KERNEL_phase`, which makes its phase; its docstring is the kernel's."""

    @functools.wraps(phase)
    def kernel(*args: P.args, **options: P.kwargs) -> R:
        (result,) = launch(phase(*args, **options))
        return result

    kernel.__name__ = kernel.__qualname__ = phase.__name__.removesuffix("_phase")
    return kernel


def launch(
    *phases: Phase, arrivals: jax.Ref | None = None, layer: jax.Array | None = None
) -> list[Any]:
    """The result of each phase.

    Args:
      phases: one or more, all with the same `cluster`.
      arrivals: of several phases, where all but the last count their blocks: int32
        `[layers, at least phases - 1]`, zero at `layer`.
      layer: int32 `[1]`.
    """
    (cluster,) = {phase.cluster for phase in phases}
    outs = [out for phase in phases for out in phase.outs]
    leaves, structure = jax.tree.flatten([phase.operands for phase in phases])
    place_of = {id(out): place for place, out in enumerate(outs)}
    places = [place_of.get(id(leaf)) for leaf in leaves]  # None for an array
    arrays = [leaf for leaf, place in zip(leaves, places, strict=True) if place is None]

    def operands(arrays, outs):
        given = iter(arrays)
        return structure.unflatten(next(given) if p is None else outs[p] for p in places)

    memory = [phase.memory for phase in phases]
    options = {name: value for phase in phases for name, value in phase.options.items()}
    kernel = plgpu.kernel(
        functools.partial(_kernel, phases=phases, operands=operands, blocks=math.prod(cluster)),
        out_type=outs,
        scratch_types=dict(
            memory=memory if len(memory) == 1 else plgpu.RefUnion(*memory),
            barriers=[phase.barriers for phase in phases],
        ),
        grid=(sum(phase.clusters for phase in phases),),
        grid_names=("cluster",),
        cluster=cluster,
        cluster_names=("quartet", "part"),
        kernel_name="_and_".join(phase.name for phase in phases),
        **_cost(phases),
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True, **options
        ),
    )
    refs = [phase.refs for phase in phases]
    arrays, layer = in_place.barrier((arrays, layer))
    written = iter(in_place.barrier(kernel(arrays, refs, layer, arrivals)))
    return [phase.form(*itertools.islice(written, len(phase.outs))) for phase in phases]


def _kernel(arrays, refs, layer, arrivals, *outs, memory, barriers, phases, operands, blocks):
    number, read, own = lax.axis_index("cluster"), operands(arrays, outs), iter(outs)
    wait, start = plgpu.griddepcontrol_wait, 0
    for place, phase in enumerate(phases):
        own_outs = list(itertools.islice(own, len(phase.outs)))
        of_phase = read[place], refs[place], own_outs, memory[place], barriers[place]
        run = functools.partial(phase.run, number - start, wait, *of_phase)
        end = start + phase.clusters
        if len(phases) == 1:
            run()
            return
        is_last = place + 1 == len(phases)
        arrived = None if is_last else arrivals.at[layer[0], place]

        @pl.when((start <= number) & (number < end))
        def _(run=run, arrived=arrived):
            run()
            if arrived is not None:
                grid.arrive(arrived)

        wait, start = functools.partial(_wait_for_phase, arrived, blocks * phase.clusters), end


def _wait_for_phase(arrived, blocks):
    plgpu.griddepcontrol_wait()  # `arrived` may have been set to zero just before
    grid.wait(arrived, blocks)


def _cost(phases):
    costs = [phase.cost for phase in phases]
    if None in costs:  # a part of the cost would mislead
        return {}
    arrays = [array for _, arrays in costs for array in arrays]
    return versions.cost(sum(flops for flops, _ in costs), arrays)

"""How Mosaic GPU lowers kernels: for lanes, not for warpgroups."""

import dataclasses

from jax.experimental.pallas import mosaic_gpu as plgpu

ORDERED = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Lane)
# Without Mosaic's barriers: the kernel orders its accesses to shared memory itself.
UNORDERED = dataclasses.replace(ORDERED, unsafe_no_auto_barriers=True)

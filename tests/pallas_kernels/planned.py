"""Pre-activations, and their gates as tile unions with the plan, from one compiled program."""

import dataclasses

import jax
import numpy as np

from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.tile_union import Plan
from tests import seeds


def pre_activations(m, h, density) -> np.ndarray:
    """float32 `[m, h]`, far from zero, of which about a share `density` is positive."""
    rng = seeds.rng()
    z = rng.uniform(0.1, 9, (m, h)).astype(np.float32)
    return np.where(rng.random((m, h)) < density, z, -z)


@jax.jit
def _plan(z, x):
    gate, masks, counts = tile_union.pack(z, x.dtype)
    gate_ref = jax.new_ref(gate)
    plan, _, heavy, _ = REFERENCE.union_plan(x, gate_ref, masks, counts)
    return gate_ref[...], counts, plan, heavy


def planned(z, x) -> tuple[jax.Array, np.ndarray, Plan, np.ndarray]:
    """(gate, counts, plan, heavy rows) of pre-activations; the work list has no spare items."""
    gate, *rest = _plan(z, x)
    counts, plan, heavy = jax.device_get(rest)
    items = plan.items[: max(1, int(plan.item_count[0]))]
    return gate, counts, dataclasses.replace(plan, items=items), heavy.rows[: heavy.count[0]]

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


def with_dense_tokens(z) -> np.ndarray:
    """`z`, but three of its tokens fire everywhere, to leave the unions."""
    dense = seeds.rng().permutation(len(z))[:3]
    z[dense] = np.abs(z[dense])
    return z


def for_unions(z, x) -> tuple[np.ndarray, Plan, np.ndarray]:
    """(gate, plan, dense gate) of the light tokens: gates that nothing may read are NaN, and those
    of heavy tokens are 0 in the dense gate, of float64."""
    gate, _, plan, heavy = planned(z, x)
    is_member = np.zeros(gate.shape[:2], bool)
    for r, size in enumerate(plan.sizes):
        is_member[r, plan.neurons[r, :size]] = True
    g = np.maximum(z, 0).astype(x.dtype).astype(np.float64)
    g[heavy] = 0
    return np.where(is_member[:, :, None], gate, np.array(np.nan, x.dtype)), plan, g

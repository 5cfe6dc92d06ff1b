"""Pre-activations, and their gates as tile unions with the plan, from one compiled program; and
shapes of plans and neuron lists."""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.kernels import REFERENCE
from pallas_kernels.layouts import tile_union
from pallas_kernels.layouts.neuron_lists import NeuronLists
from pallas_kernels.layouts.tile_union import GROUP_NEURONS, TILE_TOKENS, Plan
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


def plan_shapes(m: int, h: int, items: int | None = None) -> Plan:
    """A plan for m tokens, with room for so many items, or for all."""
    tiles = -(-m // TILE_TOKENS)
    items = tiles * h // 128 if items is None else items
    shapes = (tiles, h), (tiles,), (items,), (1,), (tiles,)
    return Plan(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))


def list_shapes(m: int, h: int, capacity: int) -> NeuronLists:
    """The lists of m tokens."""
    groups, words = h // GROUP_NEURONS, -(-m // TILE_TOKENS) * TILE_TOKENS // 32
    shapes = (capacity,), (groups,), (groups,), (groups, words, 2), (groups,)
    return NeuronLists(*(jax.ShapeDtypeStruct(shape, jnp.int32) for shape in shapes))

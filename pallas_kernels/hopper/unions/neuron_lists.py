"""Lists the tokens that use each group of 64 neurons.

One kernel finds a group's tokens, as bits, and counts them. In the next, each block goes through
the lengths of all lists, and knows where its own begins and how many are longer.
"""

import functools

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import in_place
from pallas_kernels.hopper.common import support
from pallas_kernels.hopper.unions import group_lists
from pallas_kernels.layouts.neuron_lists import ROOM_SLOTS, NeuronLists
from pallas_kernels.layouts.tile_union import TILE_TOKENS

_PARAMS = plgpu.CompilerParams(
    lowering_semantics=plgpu.LoweringSemantics.Lane, unsafe_no_auto_barriers=True
)


def neuron_lists(counts: jax.Array, m: int, capacity: int) -> tuple[NeuronLists, jax.Array]:
    """Lists the tokens of each group of neurons.

    Args:
      counts: uint8 `[H / 64, R * 256]`, R = ceil(m / 256), H a multiple of 128 up to 65536, as
        `gate_union` returns it: token t is in list b if the low 7 bits of `[b, t]` are not 0.
      m: number of tokens; those from m on are in no list.
      capacity: C, a multiple of 64.

    Returns:
      lists: if they need more than C slots, they are cut off at slot C: they lack some tokens, but
        kernels may still take them.
      lengths: int32 `[H / 64]`, how long each would be with room for all.

    Raises:
      ValueError: if a shape, a dtype or the capacity is not as above.
    """
    groups, padded_m = len(counts), pl.cdiv(m, TILE_TOKENS) * TILE_TOKENS
    support.check_array("counts", counts, (groups, padded_m), jnp.uint8)
    if capacity < ROOM_SLOTS or capacity % ROOM_SLOTS:
        raise ValueError(f"capacity must be a positive multiple of {ROOM_SLOTS}, got {capacity}")
    words = jax.ShapeDtypeStruct((groups, padded_m // 32, 2), jnp.int32)
    by_group = jax.ShapeDtypeStruct((groups,), jnp.int32)
    count = plgpu.kernel(
        functools.partial(_count, m),
        out_type=(words, by_group),
        scratch_types=dict(scratch=plgpu.SMEM((group_lists.SCRATCH_WORDS,), jnp.int32)),
        grid=(groups,),
        grid_names=("group",),
        kernel_name="count_lists",
        compiler_params=_PARAMS,
    )
    counted = in_place.barrier(count(in_place.barrier(counts)))
    fill = plgpu.kernel(
        _fill,
        out_type=(
            jax.ShapeDtypeStruct((capacity,), jnp.int32),
            by_group,
            by_group,
            words,
            by_group,
        ),
        grid=(groups, pl.cdiv(padded_m // 32, group_lists.BLOCK_WORDS)),
        grid_names=("group", "part"),
        kernel_name="neuron_lists",
        compiler_params=_PARAMS,
    )
    return NeuronLists(*in_place.barrier(fill(*counted))), counted[1]


def _count(m, counts, words, lengths, *, scratch):
    group_lists.count(counts, lax.axis_index("group"), m, words, lengths, scratch)


def _fill(found, all_lengths, *lists):
    group, part = lax.axis_index("group"), lax.axis_index("part")
    group_lists.fill(found, all_lengths, group, part, NeuronLists(*lists))

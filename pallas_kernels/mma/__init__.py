"""A back end for GPUs that have TMA but no WGMMA, such as RTX PRO 6000 and RTX 50: Hopper's kernels
of the block, by `mma.sync` and in 99 KB of shared memory.

It runs on Hopper GPUs, too, where it is tested. It has no kernels of decode steps: XLA decodes.
"""

import jax

from pallas_kernels import hopper, reference
from pallas_kernels.hopper.common import support
from pallas_kernels.hopper.common.engine import MMA, by

fused_ffn = hopper.fused_ffn
neuron_lists = hopper.neuron_lists
no_8_bits = hopper.no_8_bits
norm_grads = hopper.norm_grads
place_rows = hopper.place_rows
round_both = hopper.round_both
round_tokens = hopper.round_tokens
transposed = hopper.transposed
union_plan = hopper.union_plan

dense_block = by(MMA, hopper.dense_block)
dense_rows = by(MMA, hopper.dense_rows)
few_tokens_ffn = by(MMA, hopper.few_tokens_ffn)
gate_pack = by(MMA, hopper.gate_pack)
gate_union = by(MMA, hopper.gate_union)
hidden_grads = by(MMA, hopper.hidden_grads)
union_down = by(MMA, hopper.union_down)
union_up = by(MMA, hopper.union_up)
weight_grads = by(MMA, hopper.weight_grads)

decode_layers = reference.decode_layers
has_room = reference.has_room
project = reference.project

name: str = "MMA"
decodes: bool = False
recorded: bool = False


def unsupported(w: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot serve a block on this device; None if they can.

    Args:
      w: `[H, D]`, any of the block's weights.
    """
    return support.unsupported_by((9, 12), "a Hopper or RTX Blackwell GPU", w)

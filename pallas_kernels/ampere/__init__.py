"""A back end for GPUs without TMA and clusters, such as A100, RTX 30 and RTX 40: Hopper's kernels
of the block, by `mma.sync` and `cp.async`, in 99 KB of shared memory.

It runs on Hopper GPUs, too, where it is tested. Blocks of few tokens have kernels of their own. XLA
decodes.
"""

import jax

from pallas_kernels import hopper, reference
from pallas_kernels.ampere import few_tokens
from pallas_kernels.hopper.common import support
from pallas_kernels.hopper.common.engine import CP_ASYNC, by

fused_ffn = by(CP_ASYNC, hopper.fused_ffn)
neuron_lists = hopper.neuron_lists
no_8_bits = hopper.no_8_bits
norm_grads = hopper.norm_grads
place_rows = by(CP_ASYNC, hopper.place_rows)
round_both = hopper.round_both
round_tokens = hopper.round_tokens
transposed = hopper.transposed
union_plan = hopper.union_plan

dense_block = by(CP_ASYNC, hopper.dense_block)
dense_rows = by(CP_ASYNC, hopper.dense_rows)
gate_pack = by(CP_ASYNC, hopper.gate_pack)
gate_union = by(CP_ASYNC, hopper.gate_union)
hidden_grads = by(CP_ASYNC, hopper.hidden_grads)
union_down = by(CP_ASYNC, hopper.union_down)
union_up = by(CP_ASYNC, hopper.union_up)
weight_grads = by(CP_ASYNC, hopper.weight_grads)

few_tokens_ffn = few_tokens.few_tokens_ffn

decode_layers = reference.decode_layers
has_room = reference.has_room
project = reference.project

name: str = "Ampere"
decodes: bool = False
recorded: bool = False


def unsupported(w: jax.Array | jax.ShapeDtypeStruct) -> str | None:
    """Why the kernels cannot serve a block on this device; None if they can.

    Args:
      w: `[H, D]`, any of the block's weights.
    """
    return support.unsupported_by((8, 9, 12), "an Ampere, Ada, Hopper or RTX Blackwell GPU", w)

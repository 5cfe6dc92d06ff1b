"""The meaning of every kernel in pure JAX: a back end that runs on any device.

These functions define what a back end computes; `kernels` has the types of their arguments. Tests
run everything around the kernels with them.
"""

from pallas_kernels.quantised import rounded as round_tokens
from pallas_kernels.reference.decode import decode_layers, few_tokens_ffn, has_room, project
from pallas_kernels.reference.dense import dense_block, dense_rows, place_rows
from pallas_kernels.reference.gradients import hidden_grads, neuron_lists, weight_grads
from pallas_kernels.reference.support import no_8_bits, unsupported
from pallas_kernels.reference.transformer import norm_grads, round_both, transposed
from pallas_kernels.reference.twell import fused_ffn, gate_pack
from pallas_kernels.reference.unions import gate_union, union_down, union_plan, union_up

__all__ = [
    "decode_layers",
    "decodes",
    "dense_block",
    "dense_rows",
    "few_tokens_ffn",
    "fused_ffn",
    "gate_pack",
    "gate_union",
    "has_room",
    "hidden_grads",
    "name",
    "neuron_lists",
    "no_8_bits",
    "norm_grads",
    "place_rows",
    "project",
    "recorded",
    "round_both",
    "round_tokens",
    "transposed",
    "union_down",
    "union_plan",
    "union_up",
    "unsupported",
    "weight_grads",
]

name: str = "reference"
decodes: bool = True
recorded: bool = True

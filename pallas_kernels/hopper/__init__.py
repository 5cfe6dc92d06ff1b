"""Pallas (Mosaic GPU) kernels for Hopper GPUs: a back end, in rooms by what they are for.

`decode` serves few tokens, `dense` whole prompts and heavy rows, `twell` and `unions` the two
packed formats, `transformer` what lies around the block; `common` is what they share. Rooms import
`common` alone, never each other.
"""

from pallas_kernels.hopper.common.round_tokens import round_tokens
from pallas_kernels.hopper.common.support import no_8_bits, unsupported
from pallas_kernels.hopper.decode.few_tokens import few_tokens_ffn
from pallas_kernels.hopper.decode.one_launch.call import has_room
from pallas_kernels.hopper.decode.step import decode_layers
from pallas_kernels.hopper.decode.token_product import project
from pallas_kernels.hopper.dense.dense_block import dense_block
from pallas_kernels.hopper.dense.dense_rows import dense_rows
from pallas_kernels.hopper.dense.place_rows import place_rows
from pallas_kernels.hopper.transformer.norm_grads import norm_grads
from pallas_kernels.hopper.transformer.round_both import round_both
from pallas_kernels.hopper.transformer.transposed import transposed
from pallas_kernels.hopper.twell.fused_ffn import fused_ffn
from pallas_kernels.hopper.twell.gate_pack import gate_pack
from pallas_kernels.hopper.unions.gate_union import gate_union
from pallas_kernels.hopper.unions.hidden_grads import hidden_grads
from pallas_kernels.hopper.unions.neuron_lists import neuron_lists
from pallas_kernels.hopper.unions.union_down import union_down
from pallas_kernels.hopper.unions.union_plan import union_plan
from pallas_kernels.hopper.unions.union_up import union_up
from pallas_kernels.hopper.unions.weight_grads import weight_grads

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

name: str = "Hopper"
decodes: bool = True
recorded: bool = True

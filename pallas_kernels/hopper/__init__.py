"""Pallas (Mosaic GPU) kernels for Hopper GPUs, one file per kernel.

`frames` holds the loops that kernels share, `device` code for single warpgroups, warps and lanes.
"""

from pallas_kernels.hopper.common import round_tokens, support
from pallas_kernels.hopper.decode import (
    decode_attention,
    few_tokens,
    token_ffn,
    token_gate,
    token_pairs,
    token_product,
)
from pallas_kernels.hopper.dense import dense_block, dense_rows, place_rows
from pallas_kernels.hopper.twell import fused_ffn, gate_pack
from pallas_kernels.hopper.unions import (
    gate_union,
    hidden_grads,
    neuron_lists,
    union_down,
    union_plan,
    union_up,
    weight_grads,
)

__all__ = [
    "decode_attention",
    "dense_block",
    "dense_rows",
    "few_tokens",
    "fused_ffn",
    "gate_pack",
    "gate_union",
    "hidden_grads",
    "neuron_lists",
    "place_rows",
    "round_tokens",
    "support",
    "token_ffn",
    "token_gate",
    "token_pairs",
    "token_product",
    "union_down",
    "union_plan",
    "union_up",
    "weight_grads",
]

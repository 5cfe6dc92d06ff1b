"""Pallas (Mosaic GPU) kernels for Hopper GPUs, one file per kernel.

`frames` holds the loops that kernels share, `device` code for single warpgroups, warps and lanes.
"""

from pallas_kernels.hopper import (
    decode_attention,
    dense_block,
    dense_rows,
    few_tokens,
    fused_ffn,
    gate_pack,
    gate_union,
    hidden_grads,
    neuron_lists,
    place_rows,
    round_tokens,
    support,
    token_ffn,
    token_gate,
    token_pairs,
    token_product,
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

"""Pallas (Mosaic GPU) kernels for Hopper GPUs, one file per kernel.

`frames` holds the loops that kernels share, `device` code for single warpgroups, warps and lanes.
"""

from pallas_kernels.hopper import (
    dense_rows,
    few_tokens,
    fused_ffn,
    gate_pack,
    gate_union,
    hidden_grads,
    support,
    union_down,
    union_plan,
    union_up,
    weight_grads,
)

__all__ = [
    "dense_rows",
    "few_tokens",
    "fused_ffn",
    "gate_pack",
    "gate_union",
    "hidden_grads",
    "support",
    "union_down",
    "union_plan",
    "union_up",
    "weight_grads",
]

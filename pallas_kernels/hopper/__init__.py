"""Pallas kernels for Hopper GPUs, by Mosaic GPU: a file for each kernel.

`frames` holds what several kernels are built of, `device` what single warpgroups and lanes do.
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

"""The meaning of every kernel in pure JAX: one file per kernel, under the kernel's name.

These functions define what a back end computes, and compute it on any device. They are a back end
themselves (`kernels.REFERENCE`), with which tests run everything around the kernels.
"""

from pallas_kernels.reference import (
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

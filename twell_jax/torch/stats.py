"""Statistics of a block's hidden units, as tensors."""

from __future__ import annotations  # the documentation is built without torch

from typing import NamedTuple

import torch


class FFNStats(NamedTuple):
    """`twell_jax.ffn.FFNStats` as tensors, in the same order; their documentation is there.

    Attributes:
      l1: float32 [], mean over tokens of sum_n |h_n|; differentiable.
      nnz: float32 [], mean over tokens of the number of non-zero activations.
      max_nnz: int32 [], the largest of these numbers.
      fired: bool [H], whether a neuron was non-zero for any token.
      overflow: float32 [], 1 if sparse gradients were asked for and had no room; else 0.
      union, listed: float32 [], the shares that decide about speed; -1 where they are not measured,
        as by torch.
      tiles: int32 [H], in how many tiles of 256 tokens a neuron was non-zero; likewise.
    """

    l1: torch.Tensor
    nnz: torch.Tensor
    max_nnz: torch.Tensor
    fired: torch.Tensor
    overflow: torch.Tensor
    union: torch.Tensor
    listed: torch.Tensor
    tiles: torch.Tensor


def unpacked(l1: torch.Tensor, packed: torch.Tensor, d_ff: int) -> FFNStats:
    """The statistics of a program of JAX: all but l1 lie one after the other, int32 `[n]`."""
    fields: dict[str, torch.Tensor] = {}
    start = 0
    for name in FFNStats._fields[1:]:
        wide = name in ("fired", "tiles")
        stop = start + (d_ff if wide else 1)
        field = packed[start:stop] if wide else packed[start]
        integer = name in ("max_nnz", "tiles")
        fields[name] = (
            field != 0 if name == "fired" else field if integer else field.view(torch.float32)
        )
        start = stop
    return FFNStats(l1, **fields)

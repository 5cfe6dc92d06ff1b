"""The block by dense products of torch, on any device."""

from __future__ import annotations  # the documentation is built without torch

import torch
from torch.nn import functional

from twell_jax.ffn import activations
from twell_jax.ffn.activations import Activation
from twell_jax.ffn.stats import NOT_MEASURED
from twell_jax.torch.stats import FFNStats


def ffn(
    activation: Activation,
    x: torch.Tensor,
    w_gate: torch.Tensor | None,
    w_up: torch.Tensor,
    w_down: torch.Tensor,
    *,
    with_stats: bool = False,
) -> tuple[torch.Tensor, FFNStats | None]:
    """`sparse_ffn` without its checks, for `x: [M, D]`; the statistics are None unless wanted."""
    up = functional.linear(x, w_up)
    act = activations.rectifier(activation)
    activated = up if w_gate is None else functional.linear(x, w_gate)
    active = functional.silu(activated) if act is None else _rectified(act, activated)
    h = active
    if w_gate is not None:
        h = active * (torch.relu(up) if act is not None and act.both else up)
    y = h @ w_down
    return y, _stats(h, active) if with_stats else None


def _rectified(act: activations.Rectifier, z: torch.Tensor) -> torch.Tensor:
    z = torch.where(z.float() <= act.threshold, 0, z) if act.threshold else torch.relu(z)
    return z * z if act.squared else z


def _stats(h: torch.Tensor, active: torch.Tensor) -> FFNStats:
    nonzero = active.detach() != 0
    nnz = nonzero.sum(dim=-1, dtype=torch.int32)
    tokens = max(len(h), 1)  # of none the means are 0
    unknown = torch.full((), NOT_MEASURED, device=h.device)
    return FFNStats(
        l1=h.abs().sum(dim=-1, dtype=torch.float32).sum() / tokens,
        nnz=nnz.sum() / tokens,
        max_nnz=nnz.max() if len(nnz) else nnz.new_zeros(()),
        fired=nonzero.any(dim=0),
        overflow=torch.zeros((), device=h.device),
        union=unknown,
        listed=unknown,
        tiles=torch.full(h.shape[-1:], -1, dtype=torch.int32, device=h.device),
    )

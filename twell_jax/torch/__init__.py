"""The sparse feed-forward block for PyTorch: an operation, a module, and what replaces modules.

    from twell_jax.torch import collect_l1, replace_mlps

    replace_mlps(model, activation="relu")  # a Llama of transformers, say
    loss = model(**batch).loss + 2e-5 * collect_l1(model)

It needs the extra "torch". On a Hopper GPU the kernels of `pallas_kernels` compute the block where
they were measured to win, started by JAX on the memory of torch's tensors; anywhere else torch
does, densely. JAX takes memory as it needs it: it would take most of the GPU's at first otherwise.
"""

import os

os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")  # read when JAX first has a GPU

from twell_jax.ffn import Rectifier
from twell_jax.torch.models import replace_mlps
from twell_jax.torch.module import SparseMLP, collect_l1, collect_stats, lay_out
from twell_jax.torch.operator import sparse_ffn
from twell_jax.torch.order import order_by_use
from twell_jax.torch.stats import FFNStats

__all__ = [
    "FFNStats",
    "Rectifier",
    "SparseMLP",
    "collect_l1",
    "collect_stats",
    "lay_out",
    "order_by_use",
    "replace_mlps",
    "sparse_ffn",
]

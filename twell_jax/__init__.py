"""Sparse feed-forward blocks for language models: operation, formats, modules and training."""

from twell_jax.config import Config, ConfigError, ModelConfig
from twell_jax.ffn import FFNStats, sparse_ffn
from twell_jax.formats import TwELL, pack, unpack
from twell_jax.mlp import SparseMLP
from twell_jax.model import KVCache, Transformer
from twell_jax.prune import PruneReport, fires_removed, prune_dead
from twell_jax.sparsity import Activity, measure_activity

__all__ = [
    "Activity",
    "Config",
    "ConfigError",
    "FFNStats",
    "KVCache",
    "ModelConfig",
    "PruneReport",
    "SparseMLP",
    "Transformer",
    "TwELL",
    "fires_removed",
    "measure_activity",
    "pack",
    "prune_dead",
    "sparse_ffn",
    "unpack",
]

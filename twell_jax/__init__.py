"""Sparse feed-forward blocks for language models: operation, formats, modules and training."""

from twell_jax.config import Config, ConfigError, ModelConfig
from twell_jax.ffn import FFNStats, sparse_ffn
from twell_jax.formats import TileUnions, TwELL, pack, pack_unions, unpack
from twell_jax.mlp import SparseMLP
from twell_jax.model import KVCache, Transformer
from twell_jax.pretrained import PretrainedError, from_pretrained, save_pretrained
from twell_jax.prune import PruneReport, fires_removed, prune_dead
from twell_jax.sparsity import Activity, measure_activity

__all__ = [
    "Activity",
    "Config",
    "ConfigError",
    "FFNStats",
    "KVCache",
    "ModelConfig",
    "PretrainedError",
    "PruneReport",
    "SparseMLP",
    "TileUnions",
    "Transformer",
    "TwELL",
    "fires_removed",
    "from_pretrained",
    "measure_activity",
    "pack",
    "pack_unions",
    "prune_dead",
    "save_pretrained",
    "sparse_ffn",
    "unpack",
]

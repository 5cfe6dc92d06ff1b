"""Sparse feed-forward blocks for language models: operation, formats, modules and training."""

from twell_jax.config import Config, ConfigError, ModelConfig
from twell_jax.ffn import FFNStats, sparse_ffn
from twell_jax.formats import TwELL, pack, unpack
from twell_jax.mlp import SparseMLP
from twell_jax.model import KVCache, Transformer

__all__ = [
    "Config",
    "ConfigError",
    "FFNStats",
    "KVCache",
    "ModelConfig",
    "SparseMLP",
    "Transformer",
    "TwELL",
    "pack",
    "sparse_ffn",
    "unpack",
]
